package driver

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/config"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps"
)

// daemons is a supervisor that runs nothing.
type daemons struct {
	there   []string
	failing error
}

func (d *daemons) Start(_ context.Context, daemon mps.Daemon) error {
	d.there = append(d.there, daemon.ID)
	return d.failing
}

func (d *daemons) Stop(_ context.Context, id string) error {
	if d.failing == nil {
		d.there = slices.DeleteFunc(d.there, func(s string) bool { return s == id })
	}
	return d.failing
}

func (d *daemons) List(context.Context) ([]mps.Status, error) {
	all := make([]mps.Status, len(d.there))
	for i, id := range d.there {
		all[i].Daemon.ID = id
	}
	return all, nil
}

func TestSharesAreOfferedToAClusterThatCountsThem(t *testing.T) {
	rules, err := device.ParseShares("fractions")
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		rules    device.ShareRules
		features Features
		offered  bool
		lacking  string
	}{
		"it counts":                        {rules, Features{PartitionedDevices: true, ConsumableCapacity: true}, true, ""},
		"it drops counters":                {rules, Features{ConsumableCapacity: true}, false, "DRAPartitionableDevices"},
		"it drops what shares take":        {rules, Features{PartitionedDevices: true}, false, "DRAConsumableCapacity"},
		"it counts, and nothing is shared": {device.ShareRules{}, Features{PartitionedDevices: true, ConsumableCapacity: true}, false, ""},
		"nothing is shared":                {device.ShareRules{}, Features{}, false, ""},
	} {
		t.Run(name, func(t *testing.T) {
			got, lacking := (&Driver{shares: c.rules}).shareRules(c.features)
			if got.Any() != c.offered || !strings.Contains(lacking, c.lacking) || (lacking == "") != (c.lacking == "") {
				t.Errorf("offered: %v, lacking: %q", got.Any(), lacking)
			}
		})
	}
}

// The chart sets --mps where it makes the supervisors' DaemonSet.
func TestMPSIsOffOrDown(t *testing.T) {
	for on, says := range map[bool]string{
		false: "request gpu: MPS is switched off in this cluster: set mps.enabled=true in the chart's values",
		true:  "the MPS supervisor is not running on this node",
	} {
		t.Run(fmt.Sprint(on), func(t *testing.T) {
			n := newNode(t)
			n.cfg.MPS = on
			n.start(t)
			c := n.claim(t, "c", gpuName)
			claims := n.client.ResourceV1().ResourceClaims("team")
			stored, err := claims.Get(t.Context(), "c", metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			stored.Status.Allocation.Devices.Config = []resourceapi.DeviceAllocationConfiguration{{
				Source: resourceapi.AllocationConfigSourceClaim,
				DeviceConfiguration: resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{
					Driver:     DriverName,
					Parameters: runtime.RawExtension{Raw: []byte(`{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"MPS"}}`)},
				}},
			}}
			if _, err := claims.Update(t.Context(), stored, metav1.UpdateOptions{}); err != nil {
				t.Fatal(err)
			}
			eventually(t, "the claim is refused: "+says, func() bool { return strings.Contains(n.prepare(t, c).GetError(), says) })
		})
	}
}

func TestAnUninstallationEndsDaemons(t *testing.T) {
	cfg := config.Default()
	cfg.PluginDir, cfg.ShmRoot = t.TempDir(), t.TempDir()
	paths := MPSPaths(cfg)
	for _, dir := range []string{paths.Pipes("a"), paths.Shm("a")} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	running := &daemons{there: []string{"a", "b"}, failing: errors.New("it is busy")}
	d := &Driver{cfg: cfg, supervisor: running}
	if err := d.endDaemons(t.Context()); err == nil {
		t.Error("what could not be ended is no error")
	}
	if _, err := os.Stat(paths.Pipes("a")); err != nil {
		t.Errorf("a daemon that runs has lost its directory: %v", err)
	}
	running.failing = nil
	if err := d.endDaemons(t.Context()); err != nil || len(running.there) > 0 {
		t.Errorf("left: %v, %v", running.there, err)
	}
	for _, dir := range []string{paths.Root(), paths.ShmDir()} {
		if _, err := os.Stat(dir); !os.IsNotExist(err) {
			t.Errorf("%s: %v", dir, err)
		}
	}
	d.supervisor = mps.NewClient(paths)
	if err := d.endDaemons(t.Context()); err != nil {
		t.Errorf("without a supervisor: %v", err)
	}
}

// A claim is given back on a node whose supervisor is gone.
func TestADaemonIsStoppedWithoutASupervisor(t *testing.T) {
	paths := mps.Paths{PluginDir: t.TempDir(), ShmRoot: t.TempDir()}
	for _, dir := range []string{paths.Pipes("a"), paths.Shm("a")} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	s := supervised{Supervisor: mps.NewClient(paths), paths: paths, proc: "/proc"}
	if err := s.Stop(t.Context(), "a"); err != nil {
		t.Error(err)
	}
	for _, dir := range []string{paths.Dir("a"), paths.Shm("a")} {
		if _, err := os.Stat(dir); !os.IsNotExist(err) {
			t.Errorf("%s: %v", dir, err)
		}
	}
}
