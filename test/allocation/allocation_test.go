package allocation

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"maps"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/scan"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/model"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/scheduler"
)

const (
	simulator  = "../nvmlsim"
	driverName = "gpu.nvidia.com"
	library    = "../../build/nvmlsim/libnvidia-ml.so.1"

	// steps is the number of claims that one sequence allocates or frees.
	steps = 8

	// role is an environment variable. If it is set, the test binary does not run tests: it is the
	// child process that scans the GPUs for a test.
	role = "ALLOCATION_TEST_CHILD"
)

func TestMain(m *testing.M) {
	if os.Getenv(role) == "" {
		m.Run()
		return
	}
	if err := scan.Serve(context.Background(), os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func TestAllocatorMatchesHardware(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root: device nodes with the driver's numbers")
	}
	if out, err := exec.CommandContext(t.Context(), "make", "-s", "-C", simulator, "library").CombinedOutput(); err != nil {
		t.Fatalf("%s: %v", out, err)
	}
	models, err := model.ReadGPUs(filepath.Join(simulator, "models"))
	if err != nil {
		t.Fatal(err)
	}
	unseen, err := model.ReadGPU(filepath.Join(simulator, "conformance", "testdata", "unseen.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	models[unseen.Key] = unseen
	for _, key := range slices.Sorted(maps.Keys(models)) {
		if models[key].MIG.Supported.Value {
			t.Run(key, func(t *testing.T) { runSequences(t, models, key) })
		}
	}
}

// runSequences runs random sequences of claims on a node with one GPU of the model, and on one with
// two.
func runSequences(t *testing.T, models map[string]*model.GPU, key string) {
	t.Helper()
	path, err := filepath.Abs(library)
	must(t, "find the library", err)
	node := newNode(t, key, models[key])
	gpus := scannedGPUs(t, path, node, models)
	h := newHardware(t, path, node, models, gpus)
	seed := fnv.New64a()
	_, _ = seed.Write([]byte(key))
	c := &cluster{t: t, hardware: h, random: rand.New(rand.NewPCG(seed.Sum64(), 2))}
	sequences := 400
	if testing.Short() {
		sequences = 100
	}
	for _, n := range []int{1, 2} {
		c.publish(gpus[:n])
		for range sequences / n {
			c.sequence()
			if t.Failed() {
				return
			}
		}
	}
	t.Logf("created %d claims with %d devices and %d shares, %d of them of a device in use; refused %d claims; tried %d devices for them",
		c.granted, c.devices, c.shares, c.joined, c.refused, c.tries)
	if c.granted < sequences || c.joined < sequences/8 || c.refused < sequences/4 {
		t.Error("too few claims to prove anything")
	}
}

// cluster has the scheduler's allocator for one node and the node's simulated GPUs. Its numbers
// count the claims that the allocator granted or refused, and the devices that the test created.
type cluster struct {
	*scheduler.Scheduler
	t        *testing.T
	hardware *hardware
	random   *rand.Rand
	names    []device.Name // of all published devices
	requests []request
	accounts accounts

	granted, devices, shares, joined, refused, tries int
}

// sequence allocates and frees random claims, and at the end frees all claims. Then it fails the
// test if the simulated GPUs still have a GPU instance or a compute mode that is not the default.
func (c *cluster) sequence() {
	c.t.Helper()
	taken := scheduler.NewTaken()
	var claims [][]granted
	free := func(i int) {
		for _, g := range claims[i] {
			if err := c.hardware.destroy(g.made); err != nil {
				c.t.Fatal(err)
			}
			taken.Free(g.result)
			c.accounts.release(g.result.Device, g.result.ConsumedCapacity)
		}
		claims = slices.Delete(claims, i, i+1)
	}
	for range steps {
		if len(claims) > 0 && c.random.IntN(4) == 0 {
			free(c.random.IntN(len(claims)))
			continue
		}
		var requests []request
		for range 1 + c.random.IntN(5)/3 + c.random.IntN(8)/7 { // mostly one device
			requests = append(requests, c.requests[c.random.IntN(len(c.requests))])
		}
		if got := c.claim(taken, claims, requests); got != nil {
			claims = append(claims, got)
		}
	}
	for len(claims) > 0 {
		free(0)
	}
	if leftovers := c.hardware.leftovers(); leftovers != "" {
		c.t.Fatalf("left after everything was freed: %s", leftovers)
	}
}

// granted is a device that the allocator allocated for a claim and that the test created on the
// simulated GPUs.
type granted struct {
	made
	result resourceapi.DeviceRequestAllocationResult
}

// claim allocates devices for the requests and creates them on the simulated GPUs. If the allocator
// refuses, it returns nil. It fails the test if the GPUs cannot have the allocated devices, or
// could serve a refused claim. Errors name the devices in before, which earlier claims hold.
func (c *cluster) claim(taken *scheduler.Taken, before [][]granted, requests []request) []granted {
	c.t.Helper()
	spec := resourceapi.DeviceClaim{}
	for i, w := range requests {
		spec.Requests = append(spec.Requests, resourceapi.DeviceRequest{Name: fmt.Sprintf("r%d", i), Exactly: &resourceapi.ExactDeviceRequest{
			DeviceClassName: w.class, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: 1,
		}})
		if w.capacity != nil {
			spec.Requests[i].Exactly.Capacity = &resourceapi.CapacityRequirements{Requests: w.capacity}
		}
	}
	got, err := c.Allocate(c.t.Context(), taken, spec)
	if err != nil {
		c.t.Fatal(err)
	}
	if len(got) == 0 {
		c.refused++
		if way := c.possible(requests, nil); way != nil {
			c.t.Fatalf("next to %s the allocator refuses %s, but the hardware can have %v", deviceNames(before), classNames(requests), way)
		}
		return nil
	}
	if len(got) != len(requests) {
		c.t.Fatalf("%s: the allocator allocated %v", classNames(requests), got)
	}
	c.granted++
	var all []granted
	for i, r := range got {
		name, _ := device.ParseName(r.Device)
		if !requests[i].matches(name) {
			c.t.Fatalf("%s was requested, and %s allocated", requests[i].class, name)
		}
		gets, ever := c.accounts.consumes(r.Device, requests[i].capacity)
		if name.Share && (!ever || !same(gets, r.ConsumedCapacity) || !c.accounts.take(r.Device, gets)) {
			c.t.Fatalf("next to %s, with %v of %s held, the allocator allocated %v for %s",
				deviceNames(before), c.accounts.held[r.Device], name, r.ConsumedCapacity, classNames(requests))
		}
		m, err := c.hardware.create(name)
		if err == nil {
			err = c.hardware.fill(&m)
		}
		if err == nil && name.Share {
			err = c.hasMemory(m)
		}
		if err != nil {
			c.t.Fatalf("next to %s the allocator allocated %v for %s: %v", deviceNames(before), got, classNames(requests), err)
		}
		if name.Share {
			c.shares++
			if m.of.holders > 1 {
				c.joined++
			}
		} else {
			c.devices++
		}
		all = append(all, granted{m, r})
	}
	return all
}

// hasMemory returns an error if the claims of a shared device hold more memory than the device has
// on the simulated hardware.
func (c *cluster) hasMemory(m made) error {
	held := c.accounts.held[m.name.String()][device.CapacityMemory]
	has, err := c.hardware.memory(m)
	if err == nil && held.Value() > int64(min(has, math.MaxInt64)) {
		err = fmt.Errorf("claims hold %s of memory, the hardware has %d bytes", held.String(), has)
	}
	return err
}

// possible tries all combinations of devices for the requests on the simulated hardware. It returns
// way and the names of the first combination that the hardware creates, or nil if there is none.
// way has the names of devices that the caller created for earlier requests.
func (c *cluster) possible(requests []request, way []string) []string {
	c.t.Helper()
	if len(requests) == 0 {
		return way
	}
	for _, name := range c.names {
		if !requests[0].matches(name) {
			continue
		}
		c.tries++
		gets, ever := c.accounts.consumes(name.String(), requests[0].capacity)
		if name.Share && (!ever || !c.accounts.take(name.String(), gets)) {
			continue
		}
		m, err := c.hardware.create(name)
		var no refused
		if errors.As(err, &no) {
			c.accounts.release(name.String(), gets)
			continue
		}
		if err != nil {
			c.t.Fatal(err)
		}
		found := c.possible(requests[1:], append(slices.Clip(way), name.String()))
		c.accounts.release(name.String(), gets)
		if err := c.hardware.destroy(m); err != nil {
			c.t.Fatal(err)
		}
		if found != nil {
			return found
		}
	}
	return nil
}

func deviceNames(claims [][]granted) string {
	var all []string
	for _, claim := range claims {
		for _, m := range claim {
			all = append(all, m.name.String())
		}
	}
	return "[" + strings.Join(all, " ") + "]"
}
