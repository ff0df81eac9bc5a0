// Package cuda is how a process that computes sees simulated GPUs: what a CUDA program finds through the driver's device nodes and CUDA_VISIBLE_DEVICES,
// and which GPUs it may have by their compute mode. It is used by the stand-ins of the MPS programs and of a CUDA program.
//
// It computes nothing. The figures and rules come from the node's state file, found as the simulated NVML library finds it.
package cuda
