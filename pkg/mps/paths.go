package mps

import "path/filepath"

// Paths says where the host keeps the files of MPS daemons. The plugin, the supervisor and the container runtime know the plugin's directory by the same name.
type Paths struct {
	// PluginDir is the plugin's directory below the kubelet's root, such as /var/lib/kubelet/plugins/gpu.nvidia.com.
	PluginDir string
	// ShmRoot is the host's file system for shared memory. Empty means /dev/shm.
	ShmRoot string
}

const (
	defaultShmRoot = "/dev/shm"
	// shmName is the directory in ShmRoot that holds those of the daemons.
	shmName = "gpu-dra-driver-mps"
)

// Root holds the socket of the supervisor and a directory for each daemon.
func (p Paths) Root() string { return filepath.Join(p.PluginDir, "mps") }

// Socket is where the supervisor listens. Its name is no daemon's ID.
func (p Paths) Socket() string { return filepath.Join(p.Root(), "supervisor_socket") }

// Dir holds what a daemon has on the disk.
func (p Paths) Dir(id string) string { return filepath.Join(p.Root(), id) }

// Pipes is the directory with the daemon's pipes, which its clients are given.
func (p Paths) Pipes(id string) string { return filepath.Join(p.Dir(id), "pipe") }

// Logs is the directory with the logs of the daemon and its servers.
func (p Paths) Logs(id string) string { return filepath.Join(p.Dir(id), "log") }

// ShmDir holds the shared memory of all daemons.
func (p Paths) ShmDir() string {
	if p.ShmRoot == "" {
		return filepath.Join(defaultShmRoot, shmName)
	}
	return filepath.Join(p.ShmRoot, shmName)
}

// Shm is the directory that the daemon and its clients have as /dev/shm.
func (p Paths) Shm(id string) string { return filepath.Join(p.ShmDir(), id) }
