import pytest

from ltc import errors


@pytest.mark.parametrize("error", [errors.Unsupported, errors.InvalidGraph, errors.BackendMissing])
def test_every_error_of_ltc_is_an_ltc_error_and_a_runtime_error(error):
    assert issubclass(error, errors.LtcError)
    assert issubclass(error, RuntimeError)


def test_unsupported_is_what_pytorch_users_catch():
    assert issubclass(errors.Unsupported, NotImplementedError)


def test_a_tensor_of_another_device_is_a_plain_runtime_error():
    assert issubclass(errors.NotLazyTensor, RuntimeError)
    assert not issubclass(errors.NotLazyTensor, errors.LtcError)
