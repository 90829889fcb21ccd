"""Scripts written for torch_xla, unmodified: its modules, made of ltc's.

    import ltc.compat.torch_xla                     # before the script's own `import torch_xla`
    python -m ltc.compat.torch_xla script.py args   # or without a change to the script

In the order in which a script meets them: alias_modules makes `torch_xla` and all below it importable,
out of one table; device_strings teaches torch the device "xla"; xla_device is what
a script gets for a device. The other modules are what torch_xla has under another signature, and
xla_only is what to do instead where something belongs to XLA itself.
"""

if __name__ != "ltc.compat.torch_xla":
    raise ImportError(
        "This is ltc's stand-in for torch_xla, found because its folder is on sys.path. "
        "Write `import ltc.compat.torch_xla` before `import torch_xla`, and leave ltc/compat off the "
        "path."
    )

from ltc.compat.torch_xla import alias_modules, device_strings, xla_process_group

alias_modules.install()
device_strings.install()
xla_process_group.install()
