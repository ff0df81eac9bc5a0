// Package nvidia is the driver's one door to the hardware: NVML, the files of the NVIDIA driver, /dev, /proc and sysfs.
//
// [Scan] makes one pass over the node and returns a [Node]: the driver's versions, the GPUs that can be offered, what a container needs to use
// them (in the words of the Container Device Interface), and a [Problem] for every GPU that cannot be offered. It takes the NVML library at
// the start and gives it back at the end, and holds nothing in between.
//
// What it promises:
//   - Every path is a value ([Paths]). Edits name paths as the host sees them, whatever the plugin's own view is; [Paths.Visible] is the way back.
//   - A node that cannot serve is a [NotReadyError], which says why and which command helps.
//   - A GPU that fails, hangs or lacks its device node is left out with a Problem; the others stay.
//   - A container given a GPU gets all that CUDA needs: a node without /dev/nvidia-uvm is not ready, however well nvidia-smi works there.
//
// NVML belongs into a process of its own: a call into a broken driver may never return, a broken library takes its process down, and the C library
// cannot be replaced in a process that has called it, which a driver upgrade needs. [Isolated] therefore runs the same scan in a child process, of which
// [ServeScan] is the other end.
//
// GPUs are cut through [Partitions], which does the same for calls that change something: each GPU has a worker process while it is needed, of which
// [ServePartitions] is the other end. It looks, makes and destroys exactly what it is told and knows of no claim: that nothing is leaked is package
// prepare's business. The compute mode and the time slice of a GPU are read and set in the same way, the time slice by the driver's own nvidia-smi, which
// is shown no GPU but the one it is about: it fails where another one is lost.
//
// [Watch] listens to the GPUs, events and how each of them is, in a child process of which [ServeWatch] is the other end. It judges nothing: package health
// does. While it listens it has NVML, so that no driver can be unloaded and no GPU be reset; when it returns it has let go.
//
// Apart from that the package changes nothing on the node, and it keeps no state: package inventory does.
package nvidia
