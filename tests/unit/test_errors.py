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


def test_the_error_that_all_ranks_raise_is_told_once():
    table = "replica  what\n0  all_reduce sum\n1  all_reduce max"
    cause = f"it raised PeerFailure: Replicas differ:\n{table}\nat a.py:1"
    traceback = f'  File "a.py", line 1\nPeerFailure: Replicas differ:\n{table}\nat a.py:1'
    others = {1: f"It failed too: {cause.replace('a.py:1', 'a.py:2')}", 2: "worker:\n  at a.py:1"}
    text = str(errors.RankFailed(0, 7, cause, traceback, others))
    assert text.count("all_reduce sum") == 1
    assert "It failed too: it raised PeerFailure: Replicas differ:\nat a.py:2\n" in text
    assert "worker:\n  at a.py:1" in text
    assert text.startswith("Rank 0 (pid 7) ended before the others: it raised PeerFailure")


def test_a_rank_without_a_traceback_has_its_whole_cause():
    text = str(errors.RankFailed(0, 7, "it was killed\nby SIGKILL", "", {}))
    assert text == "Rank 0 (pid 7) ended before the others: it was killed\nby SIGKILL"
