"""The seeds' import paths: `lazy_tensor_core.x.y` is the very module `ltc.x.y`.

Installed as a top-level package. Its own names are those of `ltc`.
"""

import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

import ltc

# Modules of the original that ltc has none of, and what does their work.
_INSTEAD = {
    "core.lazy_tensor": "tensors of ltc are torch.Tensor; their sizes are Python's integers",
    "core.ltc_env_vars": "docs/api.md lists the environment variables that ltc reads",
    "core.optimize": "ltc.compile(model) replays a model without tracing it",
    "core.extract_compiled_graph": "torch.compile(model) needs no bridge; ltc.compile(model) replays it",
    "distributed.worker": "ltc.distributed.lazy_multiprocessing.spawn and torchrun start processes",
    "debug.graph_saver": "ltc.debug.graphs.text(tensor) gives a graph, LTC_SAVE_TENSORS_FILE all of them",
    "debug.metrics_compare_utils": "compare the numbers themselves: ltc.debug.metrics.as_dict()",
    "debug.model_comparator": "LTC_VERIFY=1 judges every value that a program computes",
    "debug.frame_parser_util": "ltc.explain() names the lines of the script",
}


class _Alias(MetaPathFinder, Loader):
    """Finds every module below this package among those below `ltc`."""

    def find_spec(self, fullname: str, path=None, target=None) -> ModuleSpec | None:
        if not fullname.startswith(f"{__name__}."):
            return None
        instead = _INSTEAD.get(fullname.removeprefix(f"{__name__}."))
        if instead is not None:
            raise ModuleNotFoundError(f"ltc has no {fullname}: {instead}.", name=fullname)
        if find_spec(_real(fullname)) is None:
            return None
        return ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(_real(spec.name))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # It has run already, under its real name; importlib has just put the alias's spec on it.
        alias = module.__spec__
        assert alias is not None
        module.__spec__ = alias.loader_state


def _real(name: str) -> str:
    return ltc.__name__ + name.removeprefix(__name__)


def __getattr__(name: str):
    return getattr(ltc, name)


# First: a package found here is the real one, whose folder would yield second copies of modules.
sys.meta_path.insert(0, _Alias())
