package device

import (
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/model"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/scheduler"
)

// BenchmarkAllocation measures how long the scheduler's allocator takes to allocate one claim on
// one node with eight H100. A scheduler does this for each node that it considers. The benchmark
// also reports CPU time, because wall time means little on a busy machine.
func BenchmarkAllocation(b *testing.B) {
	const smallest = "1g.10gb"
	models, err := model.ReadGPUs(filepath.Join(simulator, "models"))
	if err != nil {
		b.Fatal(err)
	}
	gpus := migCapable(models["h100-sxm5-80gb"], 8)
	every := dynamic(gpus...)
	wholeOnly := slices.Clone(every)
	for i := range wholeOnly {
		wholeOnly[i].Layout = Layout{Whole: true}
	}
	static := Offer(every)
	static = slices.DeleteFunc(static, func(s Shape) bool { p, is := s.(Partition); return !is || p.profile != smallest })
	for i, s := range static {
		static[i] = withoutCounters(s)
	}
	layouts := map[string][]Shape{"whole": Offer(wholeOnly), "static": static, "every": Offer(every)}

	gpu, mig := count(1), partitions(1, profile(smallest))
	repeat := func(r resourceapi.DeviceRequest, n int) []resourceapi.DeviceRequest {
		return slices.Repeat([]resourceapi.DeviceRequest{r}, n)
	}
	for _, c := range []struct {
		name   string // published layout, requested device, devices in use
		layout string
		taken  []resourceapi.DeviceRequest
		wanted resourceapi.DeviceRequest
	}{
		{"whole/gpu/none", "whole", nil, gpu},
		{"every/gpu/none", "every", nil, gpu},
		{"whole/gpu/4gpu", "whole", repeat(gpu, 4), gpu},
		{"every/gpu/4gpu", "every", repeat(gpu, 4), gpu},
		{"whole/gpu/all", "whole", repeat(gpu, 8), gpu},
		{"every/gpu/all", "every", repeat(gpu, 8), gpu},
		{"static/1g/none", "static", nil, mig},
		{"every/1g/none", "every", nil, mig},
		{"static/1g/10x1g", "static", repeat(mig, 10), mig},
		{"every/1g/10x1g", "every", repeat(mig, 10), mig},
		{"every/1g/4gpu+10x1g", "every", slices.Concat(repeat(gpu, 4), repeat(mig, 10)), mig},
		{"every/gpu/3gpu+10x1g", "every", slices.Concat(repeat(gpu, 3), repeat(mig, 10)), gpu},
	} {
		b.Run(c.name, func(b *testing.B) {
			node := scheduler.New(driverName, Slices(layouts[c.layout], Driver{Version: "580.65.06", CUDAVersion: "13.0"}, false), chartClasses())
			taken := scheduler.NewTaken()
			for _, r := range c.taken {
				if len(allocateOne(b, node, taken, r)) == 0 {
					b.Fatal("setup: not enough devices")
				}
			}
			before := processorTime(b)
			for b.Loop() {
				taken.Free(allocateOne(b, node, taken, c.wanted)...)
			}
			b.ReportMetric(float64(processorTime(b)-before)/float64(b.N), "cpu-ns/op")
		})
	}
}

func allocateOne(b *testing.B, node *scheduler.Scheduler, taken *scheduler.Taken,
	r resourceapi.DeviceRequest) []resourceapi.DeviceRequestAllocationResult {
	b.Helper()
	exactly := *r.Exactly
	if exactly.DeviceClassName == "" {
		exactly.DeviceClassName = driverName
	}
	results, err := node.Allocate(b.Context(), taken, requests(resourceapi.DeviceRequest{Name: "r", Exactly: &exactly}))
	if err != nil {
		b.Fatal(err)
	}
	return results
}

// processorTime returns the CPU time that this process has used.
func processorTime(b *testing.B) time.Duration {
	b.Helper()
	var used syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &used); err != nil {
		b.Fatal(err)
	}
	return time.Duration(used.Utime.Nano() + used.Stime.Nano())
}
