// The entries of kda_step.so. Its build compiles this file alone.
#define KDA_EXPORT extern "C" __attribute__((visibility("default")))

// The number that native.py calls ABI: raised whenever an entry's arguments change.
KDA_EXPORT int kda_step_abi(void) { return 1; }

// Returns 0, or a cudaError_t. Nothing is launched yet: 801 is cudaErrorNotSupported.
KDA_EXPORT int kda_step_launch(const void *) { return 801; }
