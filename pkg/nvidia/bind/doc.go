// Package bind moves GPUs between NVIDIA's driver and the VFIO drivers of the kernel, with which
// virtual machines use them. Package vfio says which writes that takes.
//
// Each call runs in a child process, which calls [Serve] and ends with its answer. A write that
// unbinds a GPU does not return while a process uses the GPU, and no signal ends it. Then the call
// returns at its deadline, and the card has no other child process until that one has ended. So a
// hung write costs one card and one process. While it hangs, the plugin's container cannot end.
//
// Before a card leaves NVIDIA's driver, nvidia-persistenced and the plugin's own processes close it
// ([Cards]), its persistence mode is switched off, and every other process that uses it is named in
// an error.
package bind
