package device

import (
	"fmt"
	"testing"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/scheduler"
)

var benchDriver = Driver{Version: "580.65.06", CUDAVersion: "13.0"}

func BenchmarkSlices(b *testing.B) {
	models := readModels(b)
	for _, n := range []int{1, 8, 16} {
		b.Run(fmt.Sprintf("%dxH100", n), func(b *testing.B) {
			gpus := migCapable(models[h100Key], n)
			b.ReportAllocs()
			for b.Loop() {
				if s := Slices(Offer(dynamic(gpus...)), benchDriver, true); len(s) == 0 {
					b.Fatal("no slices")
				}
			}
		})
	}
}

// BenchmarkAllocate measures how long the scheduler's allocator takes to allocate one device of an
// idle node that offers eight GPUs whole and in every partition.
func BenchmarkAllocate(b *testing.B) {
	node := scheduler.New(driverName, Slices(Offer(dynamic(migCapable(readModels(b)[h100Key], 8)...)), benchDriver, false), chartClasses())
	for name, request := range map[string]resourceapi.DeviceRequest{
		"whole": count(1), "1g.10gb": partitions(1, `device.attributes["gpu.nvidia.com"].profile == "1g.10gb"`),
	} {
		request.Name = "r"
		if request.Exactly.DeviceClassName == "" {
			request.Exactly.DeviceClassName = driverName
		}
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if got, err := node.Allocate(b.Context(), scheduler.NewTaken(), requests(request)); err != nil || len(got) != 1 {
					b.Fatal(got, err)
				}
			}
		})
	}
}

func BenchmarkParseName(b *testing.B) {
	for _, name := range []string{"gpu-0000-1b-00-0", "gpu-0000-1b-00-0-mig-19-3", "gpu-0000-1b-00-0-mig-9-4-ci-1-share"} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, ok := ParseName(name); !ok {
					b.Fatal("not read")
				}
			}
		})
	}
}
