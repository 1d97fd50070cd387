# Sourced by .ci/run and .ci/canary: none of the user's settings, one thread, and what is drawn is drawn by the commit:
# another run of it draws the same.
unset FASTGEN_DISABLE FASTGEN_STRICT FASTGEN_TIER FASTGEN_HISTORY FASTGEN_PACKING FASTGEN_REPLAY
unset FASTGEN_CUDA_GRAPHS FASTGEN_FOREIGN_CODE FASTGEN_VERIFY FASTGEN_NATIVE FASTGEN_CACHE FASTGEN_CACHE_DIR FASTGEN_CACHE_THRESHOLD PYTHONPATH
export OMP_NUM_THREADS=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_PROGRESS_BAR=off
python=${PYTHON:-python3}
drawn_by=${FASTGEN_CI_SEED:-$(git rev-parse HEAD 2>/dev/null || echo 0)}
