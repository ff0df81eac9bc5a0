package bench

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/host"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

func TestMain(m *testing.M) { os.Exit(host.Main(m, nil)) }

// stand is the plugin on a simulated node.
type stand struct {
	*host.Plugin
	t      *testing.T
	host   host.Host
	disk   durable.FS
	gpus   []string
	claims map[string]*resourceapi.ResourceClaim // as the API server has them
}

// newStand has that many H100s, none of which is cut.
func newStand(t *testing.T, gpus int) *stand {
	t.Helper()
	s := &stand{t: t, disk: durable.OS{}, claims: map[string]*resourceapi.ResourceClaim{}}
	var addresses []string
	for i := range gpus {
		addresses = append(addresses, fmt.Sprintf("0000:%02x:00.0", 0x20+i))
		s.gpus = append(s.gpus, fmt.Sprintf("gpu-0000-%02x-00-0", 0x20+i))
	}
	s.host = host.New(t, addresses...)
	s.start()
	t.Cleanup(func() { s.Cuts.Close() })
	return s
}

func (s *stand) start() {
	s.t.Helper()
	var err error
	s.Plugin, err = s.host.Plugin(s.t.Context(), s.disk, func(_ context.Context, _, name string) (*resourceapi.ResourceClaim, error) {
		return s.claims[name], nil
	})
	s.must("start the plugin", err)
}

// restart is a plugin that has no worker yet.
func (s *stand) restart() {
	s.t.Helper()
	s.Cuts.Close()
	s.start()
}

// hardware sets how the driver locks, and how long it takes to make a GPU instance.
func (s *stand) hardware(lock uint32, cut time.Duration) {
	s.t.Helper()
	slow := state.Fault{Kind: state.FaultSlow, GPU: state.AnyGPU, DelayMS: uint64(cut.Milliseconds())}
	s.must("slow the driver down", s.host.Change(func(f *state.File) error {
		return errors.Join(f.ClearFaults(), f.SetCutLock(lock), f.AddFault(slow, "nvmlDeviceCreateGpuInstanceWithPlacement", 0))
	}))
}

func (s *stand) must(what string, err error) {
	s.t.Helper()
	if err != nil {
		s.t.Fatalf("%s: %v", what, err)
	}
}

// claim is one that was allocated a device.
func (s *stand) claim(device string) *resourceapi.ResourceClaim {
	name := "claim-of-" + device
	if s.claims[name] == nil {
		s.claims[name] = host.Claim(name, device)
	}
	return s.claims[name]
}

// smallest are claims for all partitions of the smallest profile.
func (s *stand) smallest(gpus ...string) []*resourceapi.ResourceClaim {
	var all []*resourceapi.ResourceClaim
	for start := range 7 {
		for _, g := range gpus {
			all = append(all, s.claim(fmt.Sprintf("%s-mig-19-%d", g, start)))
		}
	}
	return all
}

// putBack ends all claims and makes the GPUs whole again.
func (s *stand) putBack() {
	s.t.Helper()
	for _, c := range slices.Collect(maps.Values(s.claims)) {
		s.must("give back", s.Unprepare(s.t.Context(), c.UID))
	}
	for _, g := range s.gpus {
		c := s.claim(g)
		_, err := s.Prepare(s.t.Context(), c)
		s.must("make whole", errors.Join(err, s.Unprepare(s.t.Context(), c.UID)))
	}
	s.restart()
}
