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
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/model"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/scheduler"
)

const (
	simulator  = "../nvmlsim"
	driverName = "gpu.nvidia.com"
	library    = "../../build/nvmlsim/libnvidia-ml.so.1"

	// sequences is how many each model goes through, steps how long one is.
	sequences, steps = 400, 8

	// The test binary plays the process that scans.
	role = "ALLOCATION_TEST_CHILD"
)

func TestMain(m *testing.M) {
	if os.Getenv(role) == "" {
		m.Run()
		return
	}
	if err := nvidia.ServeScan(context.Background(), os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func TestWhatTheAllocatorGivesIsCutAndWhatItRefusesCannotBe(t *testing.T) {
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
			t.Run(key, func(t *testing.T) { carryOut(t, models, key) })
		}
	}
}

// carryOut goes through sequences of claims that come and go, on one card of the model and on two.
func carryOut(t *testing.T, models map[string]*model.GPU, key string) {
	t.Helper()
	path, err := filepath.Abs(library)
	must(t, "find the library", err)
	node := described(t, key, models[key])
	gpus := scanned(t, path, node, models)
	h := newHardware(t, path, node, models, gpus)
	seed := fnv.New64a()
	_, _ = seed.Write([]byte(key))
	c := &cluster{t: t, hardware: h, random: rand.New(rand.NewPCG(seed.Sum64(), 2))}
	for _, n := range []int{1, 2} {
		c.publish(gpus[:n])
		for range sequences / n {
			c.sequence()
			if t.Failed() {
				return
			}
		}
	}
	t.Logf("%d claims for %d devices and %d shares, %d of them beside others, given and made, %d refused after %d devices were tried",
		c.given, c.devices, c.shares, c.joined, c.refused, c.tries)
	if c.given < sequences || c.joined < sequences/8 || c.refused < sequences/4 {
		t.Error("that proves little")
	}
}

// cluster is the scheduler above the hardware.
type cluster struct {
	*scheduler.Scheduler
	t        *testing.T
	hardware *hardware
	random   *rand.Rand
	names    []device.Name // of all devices
	wishes   []wish
	books    books

	given, devices, shares, joined, refused, tries int
}

// sequence is claims that come and go, until all are gone.
func (c *cluster) sequence() {
	c.t.Helper()
	taken := scheduler.NewTaken()
	var claims [][]given
	free := func(i int) {
		for _, g := range claims[i] {
			if err := c.hardware.destroy(g.made); err != nil {
				c.t.Fatal(err)
			}
			taken.Free(g.result)
			c.books.give(g.result.Device, g.result.ConsumedCapacity)
		}
		claims = slices.Delete(claims, i, i+1)
	}
	for range steps {
		if len(claims) > 0 && c.random.IntN(4) == 0 {
			free(c.random.IntN(len(claims)))
			continue
		}
		var wanted []wish
		for range 1 + c.random.IntN(5)/3 + c.random.IntN(8)/7 { // one device, now and then two or three
			wanted = append(wanted, c.wishes[c.random.IntN(len(c.wishes))])
		}
		if got := c.claim(taken, claims, wanted); got != nil {
			claims = append(claims, got)
		}
	}
	for len(claims) > 0 {
		free(0)
	}
	if left := c.hardware.left(); left != "" {
		c.t.Fatalf("everything was freed, and there is %s", left)
	}
}

// given is a part of a claim that was carried out.
type given struct {
	made
	result resourceapi.DeviceRequestAllocationResult
}

// claim lets the allocator decide, and the hardware judge.
func (c *cluster) claim(taken *scheduler.Taken, before [][]given, wanted []wish) []given {
	c.t.Helper()
	spec := resourceapi.DeviceClaim{}
	for i, w := range wanted {
		spec.Requests = append(spec.Requests, resourceapi.DeviceRequest{Name: fmt.Sprintf("r%d", i), Exactly: &resourceapi.ExactDeviceRequest{
			DeviceClassName: w.class, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: 1,
		}})
		if w.asks != nil {
			spec.Requests[i].Exactly.Capacity = &resourceapi.CapacityRequirements{Requests: w.asks}
		}
	}
	got, err := c.Allocate(c.t.Context(), taken, spec)
	if err != nil {
		c.t.Fatal(err)
	}
	if len(got) == 0 {
		c.refused++
		if way := c.possible(wanted, nil); way != nil {
			c.t.Fatalf("beside %s the allocator refuses %s, and the hardware can be cut into %v", inWords(before), asked(wanted), way)
		}
		return nil
	}
	if len(got) != len(wanted) {
		c.t.Fatalf("%s: the allocator gave %v", asked(wanted), got)
	}
	c.given++
	var all []given
	for i, r := range got {
		name, _ := device.ParseName(r.Device)
		if !wanted[i].wants(name) {
			c.t.Fatalf("%s was asked for, and %s given", wanted[i].class, name)
		}
		if gets, ever := c.books.reading(r.Device, wanted[i].asks); name.Share && (!ever || !same(gets, r.ConsumedCapacity) || !c.books.take(r.Device, gets)) {
			c.t.Fatalf("beside %s, which hold %v of %s, the allocator gave %v for %s", inWords(before), c.books.held[r.Device], name, r.ConsumedCapacity, asked(wanted))
		}
		m, err := c.hardware.make(name)
		if err == nil {
			err = c.hardware.fill(&m)
		}
		if err == nil && name.Share {
			err = c.hasMemory(m)
		}
		if err != nil {
			c.t.Fatalf("beside %s the allocator gave %v for %s: %v", inWords(before), got, asked(wanted), err)
		}
		if name.Share {
			c.shares++
			if m.of.holders > 1 {
				c.joined++
			}
		} else {
			c.devices++
		}
		all = append(all, given{m, r})
	}
	return all
}

// hasMemory says whether the hardware has what all that share a device hold of it.
func (c *cluster) hasMemory(m made) error {
	held := c.books.held[m.name.String()][device.CapacityMemory]
	has, err := c.hardware.memory(m)
	if err == nil && held.Value() > int64(min(has, math.MaxInt64)) {
		err = fmt.Errorf("%s of memory are held, the hardware has %d bytes", held.String(), has)
	}
	return err
}

// possible tries every way to make what is wanted, and returns one that works.
func (c *cluster) possible(wanted []wish, way []string) []string {
	c.t.Helper()
	if len(wanted) == 0 {
		return way
	}
	for _, name := range c.names {
		if !wanted[0].wants(name) {
			continue
		}
		c.tries++
		gets, ever := c.books.reading(name.String(), wanted[0].asks)
		if name.Share && (!ever || !c.books.take(name.String(), gets)) {
			continue
		}
		m, err := c.hardware.make(name)
		var no refused
		if errors.As(err, &no) {
			c.books.give(name.String(), gets)
			continue
		}
		if err != nil {
			c.t.Fatal(err)
		}
		found := c.possible(wanted[1:], append(slices.Clip(way), name.String()))
		c.books.give(name.String(), gets)
		if err := c.hardware.destroy(m); err != nil {
			c.t.Fatal(err)
		}
		if found != nil {
			return found
		}
	}
	return nil
}

func inWords(claims [][]given) string {
	var all []string
	for _, claim := range claims {
		for _, m := range claim {
			all = append(all, m.name.String())
		}
	}
	return "[" + strings.Join(all, " ") + "]"
}
