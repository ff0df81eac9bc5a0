// Package scan reads the node's GPUs.
//
// [Isolated] scans once and returns a [nvidia.Node]: the driver's versions, the GPUs that can be
// offered, the CDI edits that containers need, and a [nvidia.Problem] for every GPU left out. NVML
// runs in a child process, which calls [Serve]. It is open only during the scan. A [Fingerprint]
// says cheaply whether another scan is needed.
//
// Promises:
//   - If the node cannot serve GPUs, a scan returns a [nvidia.NotReadyError] with the reason and
//     the remedy.
//   - A GPU that fails, hangs or lacks its device node is left out with a Problem. The scan still
//     returns the other GPUs.
//   - A container gets everything that CUDA needs: a node without /dev/nvidia-uvm is not ready,
//     even if nvidia-smi works there.
//   - What is missing, refused or unknown beyond that costs only itself, and a [nvidia.Omission]
//     names it.
//   - A container gets no file from outside the driver root, whatever the driver root contains.
//
// A scan changes nothing on the node, except that NVIDIA's library may create missing device nodes.
// [LinkDeviceNodes] makes links in the host's /dev/char. The package keeps no state between scans:
// package inventory does.
package scan
