package components

import (
	"fmt"
	"path"
	"strings"
)

// containerdConfiguration returns the content of containerd's config.toml.
//
// restrict_oom_score_adj is set because containerd cannot lower a process's OOM score without
// CAP_SYS_RESOURCE. disable_apparmor is set because AppArmor profiles would have to be loaded into
// the host's kernel.
func (n Node) containerdConfiguration(programs Programs) string {
	layout := containerd2
	if strings.HasPrefix(n.Containerd, "v1.") {
		layout = containerd1
	}
	return fmt.Sprintf(layout, containerdSocket, n.PauseImage, !n.DisableCDI, path.Dir(programs("bridge")), CNIDir, programs("runc"))
}

// containerd2 is the configuration of containerd 2.
const containerd2 = `version = 3
root = '/var/lib/containerd'
state = '/run/containerd'
imports = []
disabled_plugins = ['io.containerd.snapshotter.v1.btrfs', 'io.containerd.snapshotter.v1.devmapper',
  'io.containerd.snapshotter.v1.zfs', 'io.containerd.snapshotter.v1.blockfile',
  'io.containerd.snapshotter.v1.erofs', 'io.containerd.differ.v1.erofs']

[grpc]
  address = '%[1]s'

[plugins.'io.containerd.cri.v1.images']
  snapshotter = 'overlayfs'
  [plugins.'io.containerd.cri.v1.images'.pinned_images]
    sandbox = '%[2]s'
  [plugins.'io.containerd.cri.v1.images'.registry]
    config_path = '/etc/containerd/certs.d'

[plugins.'io.containerd.cri.v1.runtime']
  enable_cdi = %[3]t
  cdi_spec_dirs = ['/etc/cdi', '/var/run/cdi']
  disable_apparmor = true
  restrict_oom_score_adj = true
  [plugins.'io.containerd.cri.v1.runtime'.cni]
    bin_dirs = ['%[4]s']
    conf_dir = '%[5]s'
  [plugins.'io.containerd.cri.v1.runtime'.containerd]
    default_runtime_name = 'runc'
    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
      runtime_type = 'io.containerd.runc.v2'
      [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
        BinaryName = '%[6]s'
        SystemdCgroup = false
`

// containerd1 is the configuration of containerd 1.7, which ignores CDI devices by default.
const containerd1 = `version = 2
root = '/var/lib/containerd'
state = '/run/containerd'
imports = []
disabled_plugins = ['io.containerd.snapshotter.v1.btrfs', 'io.containerd.snapshotter.v1.devmapper',
  'io.containerd.snapshotter.v1.zfs', 'io.containerd.snapshotter.v1.blockfile']

[grpc]
  address = '%[1]s'

[plugins.'io.containerd.grpc.v1.cri']
  sandbox_image = '%[2]s'
  enable_cdi = %[3]t
  cdi_spec_dirs = ['/etc/cdi', '/var/run/cdi']
  disable_apparmor = true
  restrict_oom_score_adj = true
  [plugins.'io.containerd.grpc.v1.cri'.registry]
    config_path = '/etc/containerd/certs.d'
  [plugins.'io.containerd.grpc.v1.cri'.cni]
    bin_dir = '%[4]s'
    conf_dir = '%[5]s'
  [plugins.'io.containerd.grpc.v1.cri'.containerd]
    snapshotter = 'overlayfs'
    default_runtime_name = 'runc'
    [plugins.'io.containerd.grpc.v1.cri'.containerd.runtimes.runc]
      runtime_type = 'io.containerd.runc.v2'
      [plugins.'io.containerd.grpc.v1.cri'.containerd.runtimes.runc.options]
        BinaryName = '%[6]s'
        SystemdCgroup = false
`
