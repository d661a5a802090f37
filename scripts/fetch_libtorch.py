#!/usr/bin/env python3
"""Puts libtorch into .libtorch/torch: downloads PyTorch's wheel with pip and unpacks only its C++ half.

pip takes only files with the hashes below. Nothing is installed and no Python package is imported. Safe to run again: a complete
.libtorch is kept, downloaded wheels are reused, and .libtorch appears only when it is complete.
"""

import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

LIBTORCH = "2.11.0"  # the version that the pinned tch crate is built for; change both together
# libtorch_cpu of the Linux wheels needs these two small libraries even on a machine without a GPU.
CUDA_STUBS = ["nvidia-cuda-runtime==13.0.96", "nvidia-cuda-cupti==13.0.85"]
# The compiler of the CUDA kernels: tests compile them on any machine, decoding compiles them on a
# machine with an NVIDIA GPU.
NVRTC = "nvidia-cuda-nvrtc==13.0.88"
# SHA-256 of the wheels for Python 3.11, of each platform.
SHA256 = {
    f"torch=={LIBTORCH}": ["7aa2f9bbc6d4595ba72138026b2074be1233186150e9292865e04b7a63b8c67a",
                           "d91aac77f24082809d2c5a93f52a5f085032740a1ebc9252a7b052ef5a4fddc6",
                           "7b6a60d48062809f58595509c524b88e6ddec3ebe25833d6462eeab81e5f2ce4"],
    CUDA_STUBS[0]: ["7f82250d7782aa23b6cfe765ecc7db554bd3c2870c43f3d1821f1d18aebf0548",
                    "ef9bcbe90493a2b9d810e43d249adb3d02e98dd30200d86607d8d02687c43f55"],
    CUDA_STUBS[1]: ["4eb01c08e859bf924d222250d2e8f8b8ff6d3db4721288cf35d14252a4d933c8",
                    "796bd679890ee55fb14a94629b698b6db54bcfd833d391d5e94017dd9d7d3151"],
    NVRTC: ["ad9b6d2ead2435f11cbb6868809d2adeeee302e9bb94bcf0539c7a40d80e8575",
            "d27f20a0ca67a4bb34268a5e951033496c5b74870b868bacd046b1b8e0c3267b"],
}
PLATFORMS = {
    ("Linux", "x86_64"): (["manylinux_2_28_x86_64", "manylinux_2_25_x86_64", "manylinux2014_x86_64", "manylinux2010_x86_64"],
                          [*CUDA_STUBS, NVRTC]),
    ("Linux", "aarch64"): (["manylinux_2_28_aarch64", "manylinux_2_25_aarch64", "manylinux2014_aarch64"], [*CUDA_STUBS, NVRTC]),
    ("Darwin", "arm64"): (["macosx_11_0_arm64"], []),
}
# Python bindings and the CUDA half: 330 MB that a CPU build does not need.
NOT_NEEDED = ("libtorch_cuda", "libtorch_python", "libtorch_nvshmem", "libtorch_global_deps", "libc10_cuda",
              "libcaffe2_nvrtc", "libshm")
# libnvrtc comes last: if it exists, the other one does too.
NVRTC_LIBRARIES = ("nvidia/cu13/lib/libnvrtc-builtins.so.13.0", "nvidia/cu13/lib/libnvrtc.so.13")
NEEDED_LIBRARIES = ("nvidia/cu13/lib/libcudart.so.13", "nvidia/cu13/lib/libcupti.so.13", *NVRTC_LIBRARIES)
FREE_BYTES = 1_500_000_000  # wheels and unpacked files, which exist at the same time for a moment

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / ".libtorch"
PARTIAL = ROOT / ".libtorch.partial"


def main():
    if is_complete(TARGET / "torch"):
        add_nvrtc()
        print(f"libtorch {LIBTORCH} is in {TARGET}")
        return
    if TARGET.is_symlink():
        stop(f"{TARGET} is a link to a libtorch that is not {LIBTORCH}.",
             f"Point it at the site-packages folder of a torch {LIBTORCH}, or remove the link and run scripts/setup again.")
    platforms, stubs = wheels_for_this_machine()
    wheels = PARTIAL / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    check_disk(wheels)
    print(f"downloading libtorch {LIBTORCH} (about 630 MB on Linux) …", flush=True)
    for requirement in [f"torch=={LIBTORCH}", *stubs]:
        download(requirement, platforms, wheels)
    unpacked = PARTIAL / "unpacked"
    shutil.rmtree(unpacked, ignore_errors=True)
    for wheel in sorted(wheels.glob("*.whl")):
        unpack(wheel, unpacked)
    finish(unpacked / "torch")
    shutil.rmtree(TARGET, ignore_errors=True)
    unpacked.rename(TARGET)
    shutil.rmtree(PARTIAL)
    print(f"libtorch {LIBTORCH} is in {TARGET}")


def add_nvrtc():
    """Adds NVRTC to a .libtorch made by an earlier version of this script. Writes nothing if .libtorch is a link."""
    if TARGET.is_symlink() or (TARGET / NVRTC_LIBRARIES[-1]).exists():
        return
    platforms, wheels_needed = wheels_for_this_machine()
    if NVRTC not in wheels_needed:
        return
    wheels, unpacked = PARTIAL / "wheels", PARTIAL / "unpacked"
    wheels.mkdir(parents=True, exist_ok=True)
    check_disk(wheels)
    print("downloading NVRTC, which compiles CUDA kernels (90 MB) …", flush=True)
    download(NVRTC, platforms, wheels)
    shutil.rmtree(unpacked, ignore_errors=True)
    for wheel in sorted(wheels.glob("nvidia_cuda_nvrtc-*.whl")):
        unpack(wheel, unpacked)
    for library in NVRTC_LIBRARIES:
        (TARGET / library).parent.mkdir(parents=True, exist_ok=True)
        (unpacked / library).rename(TARGET / library)
    shutil.rmtree(PARTIAL)


def is_complete(torch):
    """Reads the version that this script writes, or version.py of a torch installed by pip."""
    for name in ["build-version", "version.py"]:
        file = torch / name
        if file.is_file():
            return LIBTORCH in file.read_text() and (torch / "include").is_dir()
    return False


def wheels_for_this_machine():
    machine = (platform.system(), platform.machine())
    if machine not in PLATFORMS:
        stop(f"there is no libtorch for {machine[0]} on {machine[1]} here.",
             f"Set LIBTORCH to the torch folder of a PyTorch {LIBTORCH} of your own, and run again.")
    return PLATFORMS[machine]


def check_disk(folder):
    free = shutil.disk_usage(folder).free
    if free < FREE_BYTES:
        stop(f"{folder} has {free // 1_000_000} MB free; {FREE_BYTES // 1_000_000} MB are needed.",
             "Free some space and run scripts/setup again.")


def download(requirement, platforms, folder):
    """Downloads the wheel for Python 3.11, whichever Python runs this: the C++ half is the same for all versions."""
    listed = folder / "requirement.txt"
    listed.write_text(" ".join([requirement, *(f"--hash=sha256:{known}" for known in SHA256[requirement])]) + "\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
               "--only-binary=:all:", "--python-version", "3.11", "--require-hashes", "--dest", str(folder)]
    for name in platforms:
        command += ["--platform", name]
    if subprocess.call([*command, "--requirement", str(listed)]) != 0:
        stop(f"pip could not download {requirement}, or not the file that is known; its words are above.",
             "Check the network, and pip's own settings for a proxy or an index (pip config list). Then run\n"
             "scripts/setup again: it goes on with what is already downloaded. With a PyTorch "
             f"{LIBTORCH} on this machine,\nno download is needed: set LIBTORCH to its torch folder.")


def unpack(wheel, target):
    try:
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.namelist():
                if is_wanted(wheel.name, member):
                    archive.extract(member, target)
    except zipfile.BadZipFile:
        wheel.unlink()
        stop(f"{wheel.name} was damaged on its way here; it is removed.", "Run scripts/setup again.")


def is_wanted(wheel, member):
    if not wheel.startswith("torch-"):
        return member in NEEDED_LIBRARIES
    if member.startswith("torch/include/"):
        return True
    return member.startswith("torch/lib/") and not member.split("/")[2].startswith(NOT_NEEDED)


def finish(torch):
    if platform.system() == "Linux":
        # The wheel's libtorch.so needs libtorch_cuda, and GNU ld records that dependency, so
        # programs would not start.
        (torch / "lib" / "libtorch.so").write_text("INPUT(-ltorch_cpu)\n")
    (torch / "build-version").write_text(LIBTORCH + "\n")  # torch-sys compares it with its own version; the wheel has no such file


def stop(problem, remedy):
    sys.exit(f"error: {problem}\n{remedy}")


if __name__ == "__main__":
    main()
