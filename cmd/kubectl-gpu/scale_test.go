package main

import (
	"fmt"
	"io"
	"runtime"
	"runtime/debug"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gpu-dra-driver/gpu-dra-driver/cmd/kubectl-gpu/internal/doctor"
	"github.com/gpu-dra-driver/gpu-dra-driver/cmd/kubectl-gpu/internal/explain"
	"github.com/gpu-dra-driver/gpu-dra-driver/cmd/kubectl-gpu/internal/fleet"
	"github.com/gpu-dra-driver/gpu-dra-driver/cmd/kubectl-gpu/internal/status"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/fleettest"
)

// largeFleet writes an archive of 300 nodes with eight H100 in all shapes, and 2,000 claims on
// them. The claim of the Pod p fits nowhere.
func largeFleet(t *testing.T) string {
	t.Helper()
	c := fleettest.New()
	for i := range 300 {
		c.Node(fmt.Sprintf("n%03d", i), fleettest.H100, 8, "dynamic", "")
	}
	const id1g = 19
	for i := range 2000 {
		node, gpu := fmt.Sprintf("n%03d", i%300), i/300
		c.Held(fmt.Sprintf("held-%04d", i), node, fleettest.Device(gpu, id1g, uint32(gpu)))
	}
	c.Claim("want", fleettest.Request("gpu", "gpu.nvidia.com", 4))
	c.Pod("p", "want")
	return archiveOf(t, c)
}

// The limits are those of a person who waits at a terminal. Time is what the processors work for
// this process, because other work on the machine must not fail the test.
func TestLargeFleet(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-explain-long runs it, without the race detector")
	}
	const maxTime, maxBytes = 4 * time.Second, 500 << 20
	const maxRead = 6 * time.Second // of JSON. An API server answers in protobuf, which is faster
	defer debug.SetMemoryLimit(debug.SetMemoryLimit(memoryLimit))
	path := largeFleet(t)
	debug.FreeOSMemory()
	var s *fleet.Snapshot
	devices := 0
	for _, command := range []struct {
		name string
		run  func(io.Writer)
		want string
	}{
		{"read", func(w io.Writer) {
			var err error
			if s, err = fleet.ReadArchive(path); err != nil {
				t.Fatal(err)
			}
			for _, slice := range s.Slices {
				devices += len(slice.Spec.Devices)
			}
			fmt.Fprintf(w, "%d devices, %d claims", devices, len(s.Claims))
		}, "62400 devices, 2001 claims"},
		{"status", func(w io.Writer) { status.Of(s, "").Text(w, false) }, "n299"},
		{"doctor", func(w io.Writer) { doctor.Check(s).Text(w, false) }, "DeviceClass"},
		{"explain", func(w io.Writer) {
			r, err := explain.New(s).Pod(t.Context(), fleettest.Namespace, "p")
			if err != nil {
				t.Error(err)
				return
			}
			r.Text(w, false)
		}, "fits on none of the 300 nodes"},
	} {
		var out strings.Builder
		start := processorTime(t)
		command.run(&out)
		took := processorTime(t) - start
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		used := m.Sys - m.HeapReleased
		t.Logf("%s: %s, %d MiB from the system", command.name, took.Round(time.Millisecond), used>>20)
		limit := maxTime
		if command.name == "read" {
			limit = maxRead
		}
		if took > limit {
			t.Errorf("%s took %s, want at most %s", command.name, took, limit)
		}
		if used > maxBytes {
			t.Errorf("%s: %d MiB, want at most %d", command.name, used>>20, maxBytes>>20)
		}
		if !strings.Contains(out.String(), command.want) {
			t.Errorf("%s lacks %q:\n%.2000s", command.name, command.want, out.String())
		}
	}
}

// processorTime is how long the processors have worked for this process.
func processorTime(t *testing.T) time.Duration {
	t.Helper()
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		t.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
