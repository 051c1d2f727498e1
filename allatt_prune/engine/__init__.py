"Modules of the engine, each loaded when it is first used, as PyTorch is slow."
import importlib

def __getattr__(name):
    if name.startswith('_'): raise AttributeError(name)
    return importlib.import_module(f'{__name__}.{name}')
