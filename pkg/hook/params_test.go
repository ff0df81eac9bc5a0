package hook

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"
)

// readOnlyParams runs the hook in a mount namespace with a driver's params file, on a container
// whose root has the same file, and then tries to write to the container's.
const readOnlyParams = `set -e
mount --make-rprivate /
mount -t tmpfs driver /proc/driver
mkdir /proc/driver/nvidia
echo 'ModifyDeviceFiles: 1' >/proc/driver/nvidia/params
mkdir -p rootfs/proc
mount --rbind /proc rootfs/proc
echo '{"ociVersion":"1.0.2","id":"test","bundle":"'$PWD'"}' | ./nvidia-cdi-hook disable-device-node-modification
grep -qx 'ModifyDeviceFiles: 0' rootfs/proc/driver/nvidia/params || { echo "the hook did not change the container's file"; exit 1; }
if (echo 'ModifyDeviceFiles: 1' >rootfs/proc/driver/nvidia/params) 2>/dev/null; then echo "the container can write to the file"; exit 1; fi
`

// A container that could write to its /proc/driver/nvidia/params could make the driver's libraries
// in it create device nodes. The hook of toolkit 1.20.1 left the file writable.
func TestHookLeavesDriverParamsReadOnly(t *testing.T) {
	if _, err := os.Stat("/proc/driver"); err != nil || os.Geteuid() != 0 {
		t.Skip("needs root and /proc/driver")
	}
	dir := t.TempDir()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	build := exec.CommandContext(ctx, "go", "build", "-o", filepath.Join(dir, "nvidia-cdi-hook"),
		"github.com/NVIDIA/nvidia-container-toolkit/cmd/nvidia-cdi-hook")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	config := `{"ociVersion":"1.0.2","root":{"path":"rootfs"}}`
	if err := os.WriteFile(filepath.Join(dir, "config.json"), []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	run := exec.CommandContext(ctx, "unshare", "--mount", "sh", "-c", readOnlyParams)
	run.Dir = dir
	if out, err := run.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}
