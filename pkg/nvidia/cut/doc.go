// Package cut changes GPUs: their MIG mode, their MIG partitions, the compute mode, the time slice
// and the persistence mode.
//
// Each GPU has its own worker process, which calls [Serve] and ends when idle. The worker does
// exactly what it is asked and reads the result back. It knows no claims: package prepare makes
// sure that no partition leaks. Time slices are set by the driver's nvidia-smi. The worker hides
// all other GPUs from nvidia-smi, which fails if one of them is lost.
//
// A worker locks the card's file in the state directory for each request, so two plugin instances
// never change a GPU at once. A call that outlives its context kills the worker. The next call
// waits until that process is gone, because a hung process may still carry out its order.
//
// An [nvidia.Error] says what failed, on which GPU, and which processes have the GPU open.
package cut
