"""Imports single modules out of an engine's unpacked sources, without the engine's dependencies.

An engine's packages import torch, CUDA kernels and half of the engine in their __init__ files. Here each
module is one of three: *real* (listed below, executed as it ships), *bare* (a package on the way to a real
module: its __init__ is not run), or *inert* (everything else, and torch: names that can be annotated
with, subclassed, called and indexed, and that do nothing). What decides and what publishes is real.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import sysconfig
import types

REAL = {
    "vllm": {
        "vllm.config.kv_events", "vllm.config.utils", "vllm.distributed.kv_events", "vllm.envs", "vllm.logger",
        "vllm.logging_utils", "vllm.utils.hashing", "vllm.utils.math_utils", "vllm.utils.network_utils",
        "vllm.v1.core.block_pool", "vllm.v1.core.kv_cache_metrics", "vllm.v1.core.kv_cache_utils",
        "vllm.v1.kv_cache_interface", "vllm.v1.kv_cache_spec_registry",
    },
    "sglang": {
        "sglang.srt.disaggregation.kv_events", "sglang.srt.managers.scheduler_components.load_publisher",
        "sglang.srt.mem_cache.base_prefix_cache",
        "sglang.srt.mem_cache.cache_init_params", "sglang.srt.mem_cache.cpp_utils.native_hash",
        "sglang.srt.mem_cache.events", "sglang.srt.mem_cache.evict_policy", "sglang.srt.mem_cache.radix_cache",
        "sglang.srt.mem_cache.utils", "sglang.srt.utils.network",
    },
}
INERT_ROOTS = {"prometheus_client", "torch", "transformers", "triton"}


class Unavailable(Exception):
    """Something that scripts/engines/fetch brings is not here; the text says what to do."""


class Inert(type):
    """The metaclass of classes that stand for code which is not here: what is done to one gives it back."""

    def itself(cls, *_):
        return cls

    __getitem__ = __or__ = __ror__ = itself

    def __iter__(cls):
        yield from ()

    def __getattr__(cls, name):
        return inert(name)


class Idle:
    """Takes any arguments and does nothing."""

    def __init__(self, *_, **__):
        """Keeps none of them."""


def inert(name):
    """A class of this name. Python's own protocols probe by double-underscored names and must not find one."""
    if name.startswith("__"):
        raise AttributeError(name)
    return Inert(name, (Idle,), {"__module__": "inert"})


class Hollow(types.ModuleType):
    """A bare or inert module: real submodules import on access, every other name is inert."""

    def __getattr__(self, name):
        full = f"{self.__name__}.{name}"
        if full in REAL.get(full.split(".")[0], ()):
            return importlib.import_module(full)
        # Kept, so that a name is one class wherever it is imported.
        return self.__dict__.setdefault(name, inert(name))


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Decides for one engine which modules are real, bare or inert."""

    def __init__(self, engine, root, real):
        self.engine, self.root, self.real = engine, root, real

    def find_spec(self, name, path=None, target=None):
        top = name.split(".")[0]
        if top not in INERT_ROOTS | {self.engine}:
            return None
        if any(name == real or name.startswith(real + ".") for real in self.real):
            return None  # Python's own finder takes it from the parent's path
        spec = importlib.machinery.ModuleSpec(name, self, is_package=True)
        if any(real.startswith(name + ".") for real in self.real):
            spec.submodule_search_locations.append(os.path.join(self.root, *name.split(".")))
        return spec

    def create_module(self, spec):
        return Hollow(spec.name)

    def exec_module(self, module):
        pass


def cache():
    """Where scripts/engines/fetch puts things."""
    return os.environ.get("KVROUTED_ENGINES") or os.path.expanduser("~/.cache/kvrouted-engines")


def install(engine, version, real=None):
    """Makes the real modules of `engine` importable: `real`, or all that are listed above."""
    if any(isinstance(finder, Finder) for finder in sys.meta_path):
        return  # a publisher that begins anew finds them there
    root = os.path.join(cache(), "src", f"{engine}-{version}")
    if not os.path.isdir(os.path.join(root, engine)):
        raise Unavailable(f"{root} is not there: run scripts/engines/fetch {engine}=={version}")
    if real is not None:
        REAL[engine] = real
    sys.meta_path.insert(0, Finder(engine, root, REAL[engine]))


def native_page_hash():
    """SGLang's compiled page hash, as fetch left it."""
    path = os.path.join(cache(), "native", "hicache_hash_cpp" + sysconfig.get_config_var("EXT_SUFFIX"))
    if not os.path.exists(path):
        raise Unavailable(f"{path} is not there: install g++, python3-dev and libssl-dev, then run scripts/engines/fetch")
    spec = importlib.util.spec_from_file_location("hicache_hash_cpp", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
