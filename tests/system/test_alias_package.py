"""The seeds' import paths give ltc's own modules."""

import importlib
import importlib.util

import pytest

import ltc

NAMES = ["core.lazy_model", "utils.utils", "utils.keyd_queue", "debug.metrics", "amp.syncfree"]


@pytest.mark.parametrize("name", NAMES)
def test_a_module_of_the_alias_is_the_very_module(name):
    real = importlib.import_module(f"ltc.{name}")
    assert importlib.import_module(f"lazy_tensor_core.{name}") is real
    assert real.__spec__.name == real.__name__ == f"ltc.{name}"


def test_the_seeds_own_import_line_works():
    import lazy_tensor_core.core.lazy_model as ltm

    assert ltm is importlib.import_module("ltc.core.lazy_model")


def test_the_alias_has_ltcs_names():
    import lazy_tensor_core

    assert lazy_tensor_core.__version__ == ltc.__version__


def test_a_module_that_ltc_lacks_is_missing_under_the_alias_too():
    with pytest.raises(ModuleNotFoundError, match="lazy_tensor_core.core.no_such_module"):
        importlib.import_module("lazy_tensor_core.core.no_such_module")


@pytest.mark.parametrize("name", ["debug.model_comparator", "core.ltc_env_vars"])
def test_a_module_of_the_original_that_ltc_lacks_is_missing_with_advice(name):
    with pytest.raises(ModuleNotFoundError, match=f"lazy_tensor_core.{name}: .*(LTC_VERIFY|docs)"):
        importlib.import_module(f"lazy_tensor_core.{name}")
    assert importlib.util.find_spec(f"ltc.{name}") is None
