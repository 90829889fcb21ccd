"""Parts of training scripts besides `ltc.core`; files are in `ltc.checkpointing`."""

from ltc.support.lazy_module import lazy_names

__getattr__ = lazy_names(globals())  # its modules need no import of their own
