"""Kernels that every x86 processor with AVX2 has, so that a trained policy is the same on all

torch and MKL choose faster ones for each processor, and two policies that were trained by them
part after some steps. Set before torch is imported. It costs tests and notebooks no time.
"""

from pathlib import Path


def kernels():
    "Environment variables; none without AVX2, since torch would use it unasked and die"
    info = Path('/proc/cpuinfo')
    if not info.exists() or ' avx2 ' not in info.read_text():
        return {}
    return dict(ATEN_CPU_CAPABILITY='avx2', MKL_CBWR='AVX2', ONEDNN_MAX_CPU_ISA='AVX2')
