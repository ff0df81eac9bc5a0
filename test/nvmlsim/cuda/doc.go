// Package cuda shows a computing process what CUDA on simulated GPUs would show: the devices found
// through the driver's device nodes and CUDA_VISIBLE_DEVICES, and the GPUs that the compute mode
// allows. The stand-ins for the MPS programs and for a CUDA program use it.
//
// The package computes nothing. It takes memory sizes, names and rules from the node's state file,
// and finds that file in the same way as the simulated NVML library.
package cuda
