package bind

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

// The kernel shows the driver of a card that was just given back before NVIDIA's driver lists the
// card.
func TestCallWaitsUntilNVIDIADriverListsTheCard(t *testing.T) {
	const card = "0000:1b:00.0"
	for name, listed := range map[string]bool{"listed late": true, "never listed": false} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			device, list := filepath.Join(root, "sys/bus/pci/devices", card), filepath.Join(root, "proc/driver/nvidia/gpus", card)
			must(t, errors.Join(os.MkdirAll(device, 0o750), os.MkdirAll(list, 0o750), os.Symlink("../nvidia", filepath.Join(device, "driver"))))
			synctest.Test(t, func(t *testing.T) {
				if listed {
					time.AfterFunc(listLimit/2, func() {
						if err := os.WriteFile(filepath.Join(list, "information"), []byte("Device Minor: 3\n"), 0o600); err != nil {
							t.Error(err)
						}
					})
				}
				began := time.Now()
				o := order{Paths: nvidia.Paths{Sysfs: filepath.Join(root, "sys"), Proc: filepath.Join(root, "proc")}, Card: card}
				_, err := o.awaitNodes(t.Context())
				if listed && err != nil || !listed && (!errors.Is(err, fs.ErrNotExist) || time.Since(began) != listLimit) {
					t.Errorf("%v after %s", err, time.Since(began))
				}
			})
		})
	}
}
