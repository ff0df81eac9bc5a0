// Package layout creates the files of a simulated GPU node, as the driver, its installer and the
// kernel would:
//
//   - <root>/driver is the driver root with libraries, nvidia-smi and the firmware folder.
//   - <root>/proc has /proc/devices, /proc/driver/nvidia and /proc/driver/nvidia-caps.
//   - <root>/sys has /sys/bus/pci and /sys/devices/pci….
//   - /dev has device nodes with the driver's numbers but no kernel driver.
//
// The root also has the state file of the simulated library. A hard link to the state file lies in
// the driver root's firmware folder under a name (gsp*.bin) that NVIDIA's CDI discovery mounts into
// containers. The state thus reaches containers in the same way as in production.
//
// Apply makes the files on disk agree with the saved configuration and the state, and may be called
// repeatedly. The package removes only files in its root, and device nodes with the names of the
// simulated driver.
package layout
