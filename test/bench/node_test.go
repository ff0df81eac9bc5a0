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
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nodeharness"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvidiatest"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

func TestMain(m *testing.M) { os.Exit(nodeharness.Main(m, nil)) }

// testNode is the part of the plugin that prepares and unprepares claims, on a simulated node. A
// map takes the place of the API server.
type testNode struct {
	*nodeharness.Plugin
	t      *testing.T
	node   nodeharness.Node
	disk   durable.FS
	gpus   []string
	claims map[string]*resourceapi.ResourceClaim // in the API server
}

// newTestNode returns a node with this many H100s, which have no partitions.
func newTestNode(t *testing.T, gpus int) *testNode {
	t.Helper()
	s := &testNode{t: t, disk: durable.OS{}, claims: map[string]*resourceapi.ResourceClaim{}}
	var addresses []string
	for i := range gpus {
		addresses = append(addresses, fmt.Sprintf("0000:%02x:00.0", 0x20+i))
		s.gpus = append(s.gpus, fmt.Sprintf("gpu-0000-%02x-00-0", 0x20+i))
	}
	s.node = nodeharness.New(t, addresses...)
	s.start()
	t.Cleanup(func() { nvidiatest.StopWorkers(s.Worker) })
	return s
}

func (s *testNode) start() {
	s.t.Helper()
	var err error
	s.Plugin, err = s.node.Plugin(s.t.Context(), s.disk, func(_ context.Context, _, name string) (*resourceapi.ResourceClaim, error) {
		return s.claims[name], nil
	})
	s.must("start the plugin", err)
}

// restart replaces the Prepare and Unprepare code with a new instance, which knows only what is on
// the disk. Its worker process starts when it is first needed.
func (s *testNode) restart() {
	s.t.Helper()
	nvidiatest.StopWorkers(s.Worker)
	s.start()
}

// hardware changes the simulated driver. lock says whether the driver creates one GPU instance at a
// time on the whole node, or one at a time on each GPU. createTime is how long a creation takes.
func (s *testNode) hardware(lock uint32, createTime time.Duration) {
	s.t.Helper()
	slow := state.Fault{Kind: state.FaultSlow, GPU: state.AnyGPU, DelayMS: uint64(createTime.Milliseconds())}
	s.must("slow the driver down", s.node.Change(func(f *state.File) error {
		return errors.Join(f.ClearFaults(), f.SetCutLock(lock), f.AddFault(slow, "nvmlDeviceCreateGpuInstanceWithPlacement", 0))
	}))
}

func (s *testNode) must(what string, err error) {
	s.t.Helper()
	if err != nil {
		s.t.Fatalf("%s: %v", what, err)
	}
}

// claim returns the claim for the named device, and creates it on the first call.
func (s *testNode) claim(device string) *resourceapi.ResourceClaim {
	name := "claim-of-" + device
	if s.claims[name] == nil {
		s.claims[name] = nodeharness.Claim(name, device)
	}
	return s.claims[name]
}

// smallest returns one claim for each partition of the smallest profile that fits on the named
// GPUs.
func (s *testNode) smallest(gpus ...string) []*resourceapi.ResourceClaim {
	var all []*resourceapi.ResourceClaim
	for start := range 7 {
		for _, g := range gpus {
			all = append(all, s.claim(fmt.Sprintf("%s-mig-19-%d", g, start)))
		}
	}
	return all
}

// unprepareAll unprepares all claims, makes the plugin disable the GPUs' MIG mode, and restarts the
// plugin.
func (s *testNode) unprepareAll() {
	s.t.Helper()
	for _, c := range slices.Collect(maps.Values(s.claims)) {
		s.must("unprepare", s.Unprepare(s.t.Context(), c.UID))
	}
	for _, g := range s.gpus {
		c := s.claim(g)
		_, err := s.Prepare(s.t.Context(), c)
		s.must("disable MIG mode", errors.Join(err, s.Unprepare(s.t.Context(), c.UID)))
	}
	s.restart()
}
