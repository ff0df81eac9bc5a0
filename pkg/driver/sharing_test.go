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
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/metrics"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps"
)

// fakeSupervisor fakes an MPS supervisor. It remembers the IDs of running daemons, but starts no
// process. If err is set, Start and Stop return it.
type fakeSupervisor struct {
	running []string
	err     error
}

func (d *fakeSupervisor) Start(_ context.Context, daemon mps.Daemon) error {
	d.running = append(d.running, daemon.ID)
	return d.err
}

func (d *fakeSupervisor) Stop(_ context.Context, id string) error {
	if d.err == nil {
		d.running = slices.DeleteFunc(d.running, func(s string) bool { return s == id })
	}
	return d.err
}

func (d *fakeSupervisor) List(context.Context) ([]mps.Status, error) {
	all := make([]mps.Status, len(d.running))
	for i, id := range d.running {
		all[i].Daemon.ID = id
	}
	return all, nil
}

// The error of a Prepare that needs MPS must name what is missing: the chart's value
// mps.enabled=true, or the MPS supervisor on this node.
func TestMPSRefusalNamesSwitchOrSupervisor(t *testing.T) {
	for on, says := range map[bool]string{
		false: "request gpu: MPS is switched off in this cluster: set mps.enabled=true in the chart's values",
		true:  "the MPS supervisor is not running on this node",
	} {
		t.Run(fmt.Sprint(on), func(t *testing.T) {
			const mpsConfig = `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"MPS"}}`
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
					Driver: DriverName, Parameters: runtime.RawExtension{Raw: []byte(mpsConfig)},
				}},
			}}
			if _, err := claims.Update(t.Context(), stored, metav1.UpdateOptions{}); err != nil {
				t.Fatal(err)
			}
			eventually(t, "the claim is refused: "+says, func() bool { return strings.Contains(n.prepare(t, c).GetError(), says) })
		})
	}
}

func TestUninstallStopsMPSDaemons(t *testing.T) {
	cfg := config.Default()
	cfg.PluginDir = t.TempDir()
	paths := MPSPaths(cfg)
	for _, dir := range []string{paths.Pipes("a"), paths.Shm("a")} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	running := &fakeSupervisor{running: []string{"a", "b"}, err: errors.New("it is busy")}
	node := nodeSupervisor{running, paths, t.TempDir(), metrics.New("test")}
	if err := node.StopAll(t.Context()); err == nil {
		t.Error("no error for daemons that could not be stopped")
	}
	if _, err := os.Stat(paths.Pipes("a")); err != nil {
		t.Errorf("a running daemon lost its directory: %v", err)
	}
	running.err = nil
	if err := node.StopAll(t.Context()); err != nil || len(running.running) > 0 {
		t.Errorf("left: %v, %v", running.running, err)
	}
	if _, err := os.Stat(paths.Root()); !os.IsNotExist(err) {
		t.Errorf("%s: %v", paths.Root(), err)
	}
	node.Daemons = mps.NewClient(paths)
	if err := node.StopAll(t.Context()); err != nil {
		t.Errorf("without a supervisor: %v", err)
	}
}

// Stop must succeed and remove the daemon's files even if the node's MPS supervisor is gone.
// Otherwise claims could not be unprepared.
func TestStopDaemonWithoutSupervisor(t *testing.T) {
	paths := mps.Paths{PluginDir: t.TempDir()}
	for _, dir := range []string{paths.Pipes("a"), paths.Shm("a")} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	s := nodeSupervisor{Daemons: mps.NewClient(paths), paths: paths, proc: "/proc"}
	if err := s.Stop(t.Context(), "a"); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(paths.Dir("a")); !os.IsNotExist(err) {
		t.Errorf("%s: %v", paths.Dir("a"), err)
	}
}
