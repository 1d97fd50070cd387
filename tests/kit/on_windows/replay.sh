#!/usr/bin/env bash
# Builds the operators for Windows and replays recorded calls there, under Wine: see README.md.
#     replay.sh FOLDER    which holds the wheels of torch and msvc-runtime for Windows, and *.bin of recorder.py
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
work=$(cd "$1" && pwd)
torch=$(python -c 'import torch; print(torch.__path__[0])')
headers=$(echo /usr/lib/gcc/x86_64-w64-mingw32/*-posix)
# Clang, as GCC does not align the stack for AVX on Windows; its headers for C++ are those of the linker's library.
compile=(clang++ --target=x86_64-w64-windows-gnu -c -std=c++17 -nostdinc++)
compile+=(-isystem "$headers/include/c++" -isystem "$headers/include/c++/x86_64-w64-mingw32")
compile+=(-isystem "$torch/include" -DTORCH_TARGET_VERSION=0x020a000000000000)
link=(x86_64-w64-mingw32-g++-posix -static)

cd "$work"
unzip -q -o torch-*.whl 'torch/lib/*'
unzip -q -o -j msvc_runtime-*.whl '*.data/data/*.dll' -d torch/lib
for source in "$here"/../../../csrc/cpu/*.cpp; do
    "${compile[@]}" -O3 -DNDEBUG -Wall "$source" -o "$(basename "$source" .cpp).o"
done
"${link[@]}" -shared -o torch/lib/fastgen_cpu.dll ./*.o torch/lib/torch_cpu.lib 2> >(grep -v 'duplicate section' >&2)
"${compile[@]}" -O1 -Wall -I"$here/../../../csrc" "$here/replay.cpp" -o torch/lib/replay.o
"${link[@]}" -o torch/lib/replay.exe torch/lib/replay.o torch/lib/torch_cpu.lib 2> >(grep -v 'duplicate section' >&2)

# KMP_AFFINITY: Intel's OpenMP asks for what Wine lacks. The C++ runtime: Microsoft's, not Wine's.
export WINEDEBUG=-all WINEPREFIX=$work/wine KMP_AFFINITY=disabled
export WINEDLLOVERRIDES="msvcp140,vcruntime140,vcruntime140_1=n,b"
wine=$(command -v wine64 || echo /usr/lib/wine/wine64)
cd torch/lib
for calls in "$work"/*.bin; do
    echo "== $(basename "$calls" .bin)"
    ATEN_CPU_CAPABILITY=$(basename "$calls" .bin) "$wine" replay.exe fastgen_cpu.dll "Z:$calls"
done
