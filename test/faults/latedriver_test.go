package faults

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2/ktesting"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nodeharness"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/layout"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

// After a reboot NVIDIA's driver comes so late that the plugin offers the node's GPUs for virtual
// machines. One GPU has the partition of a claim that was prepared before the reboot, another that
// of a claim that was not. Both stay with their claims.
func TestLateDriverFindsPartitionsOfClaims(t *testing.T) {
	t.Parallel()
	const gpu2 = "gpu-0000-1d-00-0"
	n, api := nodeharness.New(t, "0000:1b:00.0", "0000:1c:00.0", "0000:1d:00.0"), nodeharness.NewAPI()
	must := func(what string, err error) {
		t.Helper()
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
	}
	_, ctx := ktesting.NewTestContext(t)
	machine, err := layout.Load(n.Root)
	must("load the layout", err)
	for i := range machine.Node.GPUs {
		machine.Node.GPUs[i].IOMMUGroup, machine.Node.GPUs[i].ResetMethod = ptr.To(uint32(i)), "flr"
	}
	cfg := n.Config()
	cfg.Settings.Passthrough.Enabled = ptr.To(true)
	d, err := n.StartWatching(ctx, api, cfg)
	must("start", err)
	defer func() { must("stop", d.Stop()) }()
	prepared := nodeharness.Claim("prepared", gpu0+"-mig-19-0")
	must("allocate", api.Allocate(ctx, prepared))
	must("prepare", eventually(ctx, func(ctx context.Context) error { return d.Prepare(ctx, prepared) }))
	pending := nodeharness.Claim("pending", gpu1+"-mig-19-0")
	must("allocate", api.Allocate(ctx, pending))
	must("stop", d.Stop())

	// The reboot. The kubelet deletes the node's slices when it starts.
	must("reboot", n.Change(func(f *state.File) error { return machine.DriverAway(f, true, true) }))
	must("load vfio_pci", os.MkdirAll(filepath.Join(cfg.SysfsRoot, "module/vfio_pci/drivers/pci:vfio-pci"), 0o755))
	bootID := filepath.Join(cfg.ProcRoot, "sys/kernel/random/boot_id")
	must("boot", os.MkdirAll(filepath.Dir(bootID), 0o755))
	must("boot", os.WriteFile(bootID, []byte("another-boot\n"), 0o600))
	slicesBefore, err := api.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{})
	must("list the slices", err)
	for _, s := range slicesBefore.Items { // the fake API server ignores DeleteCollection
		must("delete a slice", api.ResourceV1().ResourceSlices().Delete(ctx, s.Name, metav1.DeleteOptions{}))
	}
	d, err = n.StartWatching(ctx, api, cfg)
	must("start again", err)

	published := func(ctx context.Context) (map[string][]resourceapi.DeviceCounterConsumption, error) {
		list, err := api.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{})
		devices := map[string][]resourceapi.DeviceCounterConsumption{}
		for _, s := range list.Items {
			for _, d := range s.Spec.Devices {
				devices[d.Name] = d.ConsumesCounters
			}
		}
		return devices, err
	}
	noDriver := func(ctx context.Context) error {
		devices, err := published(ctx)
		if len(devices) == 0 {
			return errors.Join(err, errors.New("nothing is published"))
		}
		return err
	}
	began := time.Now()
	_ = eventually(ctx, noDriver) // the plugin first waits 30 s for the driver
	must("without a driver", eventually(ctx, noDriver))
	devices, err := published(ctx)
	if names := slices.Collect(maps.Keys(devices)); err != nil || !slices.Equal(names, []string{gpu2 + "-vfio"}) {
		t.Errorf("%s after the reboot the node offers %v, %v", time.Since(began).Round(time.Second), names, err)
	}

	must("load the driver", n.Change(func(f *state.File) error { return machine.DriverBack(f, "", "") }))
	for _, c := range []*resourceapi.ResourceClaim{prepared, pending} {
		must("prepare "+c.Name, eventually(ctx, func(ctx context.Context) error { return d.Prepare(ctx, c) }))
	}
	must("with the driver", eventually(ctx, func(ctx context.Context) error {
		devices, err := published(ctx)
		for _, name := range []string{gpu0 + "-mig-19-0", gpu1 + "-mig-19-0"} {
			if len(devices[name]) == 0 {
				err = errors.Join(err, fmt.Errorf("%s consumes no counters", name))
			}
		}
		return err
	}))
}
