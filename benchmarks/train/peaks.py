"""What GPUs can do at most: dense bfloat16 operations a second, by the name that CUDA reports.

From NVIDIA's data sheets, whose figures with sparsity are halved. Names must match whole: a slice
of a GPU (MIG) has a longer name and another peak. A GPU that is not here has no MFU.
"""

from __future__ import annotations

NVIDIA = "https://www.nvidia.com/en-us/data-center"
PEAKS: dict[str, tuple[float, str]] = {
    "NVIDIA H200": (989e12, f"{NVIDIA}/h200/"),
    "NVIDIA H100 80GB HBM3": (989e12, f"{NVIDIA}/h100/"),
    "NVIDIA H100 PCIe": (756e12, f"{NVIDIA}/h100/"),
    "NVIDIA H100 NVL": (835e12, f"{NVIDIA}/h100/"),
    "NVIDIA GH200 480GB": (989e12, f"{NVIDIA}/grace-hopper-superchip/"),
    **{
        f"NVIDIA A100{kind}": (312e12, f"{NVIDIA}/a100/")
        for kind in ("-SXM4-40GB", "-SXM4-80GB", "-PCIE-40GB", " 80GB PCIe")
    },
    "NVIDIA L4": (121e12, f"{NVIDIA}/l4/"),
    "NVIDIA L40S": (362e12, f"{NVIDIA}/l40s/"),
}


def peak(name: str | None) -> float | None:
    """Dense bfloat16 operations a second of a GPU; None for a CPU, and for a GPU that is not in the
    table.
    """
    return PEAKS[name][0] if name in PEAKS else None
