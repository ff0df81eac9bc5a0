// Package layout lays a simulated GPU node out on disk, as the driver, its installer and the kernel would:
//
//	<root>/driver   the driver root: libraries with SONAMEs, nvidia-smi, the firmware folder
//	<root>/proc     /proc/devices, /proc/driver/nvidia, /proc/driver/nvidia-caps
//	<root>/sys      /sys/bus/pci, /sys/devices/pci…
//	/dev            device nodes with the driver's numbers; no kernel driver is behind them
//
// The state file of the simulated library lies in the root and, as a hard link, in the driver root's firmware folder, under a name
// (gsp*.bin) that the driver's own CDI discovery mounts into containers. So the state reaches containers by the production path.
//
// Everything is drawn from the saved configuration and the state: Apply makes the disk agree with them, however often it is
// called. The package removes only what lies in its root, and device nodes with its own numbers.
package layout
