# SPDX-License-Identifier: Apache-2.0
"""Describes the machine and the settings that affect speed."""
import os
import pathlib
import platform

# Variables that change what BLAS, OpenMP or PyTorch do.
PREFIXES = ("OPENBLAS_", "MKL_", "BLIS_", "OMP_", "GOMP_", "KMP_", "DNNL_", "ONEDNN_", "ATEN_", "TORCH", "GLOO_", "FSDP_",
            "LD_PRELOAD")
NOTED = ("avx2", "fma", "avx512f", "avx512vl", "avx512_bf16", "avx512_fp16", "amx_bf16", "asimd", "sve", "sve2", "bf16", "i8mm")


def cpu_info():
    """@return the processor's name, and the instruction sets that the kernel lists"""
    name, flags = platform.machine(), set()
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            name = value.strip()
        elif key.strip() in ("flags", "Features"):
            flags = set(value.split())
    return name, flags


def describe():
    name, flags = cpu_info()
    return {
        "cpu": name,
        "instruction_sets": [flag for flag in NOTED if flag in flags],
        "virtual": "hypervisor" in flags,
        "cores": os.cpu_count(),
        "cores_allowed": sorted(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
    }


def blas_environment():
    """OpenBLAS as examples/nanogpt/run.sh sets it: the widest kernels that the processor has."""
    return {"OPENBLAS_CORETYPE": "SkylakeX"} if "avx512vl" in cpu_info()[1] else {}


def speed_variables(environment):
    """Variables of an environment that change speed, and those that differ from this program's."""
    chosen = {key: value for key, value in sorted(environment.items()) if key.startswith(PREFIXES)}
    changed = {key: os.environ.get(key) for key, value in chosen.items() if os.environ.get(key) != value}
    return chosen, changed
