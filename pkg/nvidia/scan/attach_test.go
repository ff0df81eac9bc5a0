package scan

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/nvmlx"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvidiatest"
)

// slowToOpen returns a fake NVML library with eight cards. The cards open one after another, and
// each takes the time cost. A card for which hang is true stays out of that order and answers only
// after over is closed.
func slowToOpen(h nvidiatest.Host, cost time.Duration, hang func(i int) bool, over <-chan struct{}) *nvidiatest.Library {
	cards := make([]nvidiatest.Card, 8)
	for i := range cards {
		cards[i] = nvidiatest.Card{
			Bus:  fmt.Sprintf("00000000:%02X:00.0", 0xa0+i),
			UUID: fmt.Sprintf("GPU-00000000-0000-0000-0000-00000000000%d", i), Name: "NVIDIA L40S", Minor: 10 + i,
		}
		h.Node(fmt.Sprintf("driver/dev/nvidia%d", cards[i].Minor))
	}
	library := nvidiatest.NVML(cards...)
	find, driver := library.DeviceGetHandleByIndexFunc, make(chan struct{}, 1)
	library.DeviceGetHandleByIndexFunc = func(i int) (nvml.Device, nvml.Return) {
		if hang(i) {
			<-over
		}
		select {
		case driver <- struct{}{}:
		case <-over:
			return nil, nvml.ERROR_UNKNOWN
		}
		<-time.After(cost)
		<-driver
		return find(i)
	}
	return library
}

func TestScanOffersGPUsThatOpenSequentially(t *testing.T) {
	for _, cost := range []time.Duration{3 * time.Second, 6 * time.Second, 9 * time.Second} {
		t.Run(cost.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h, over := nvidiatest.NewHost(t), make(chan struct{})
				defer func() { close(over); <-time.After(8 * cost) }() // until the library is idle
				library := slowToOpen(h, cost, func(int) bool { return false }, over)
				node, err := scannerOf(h, library).scan(t.Context())
				if err != nil || len(node.GPUs) != 8 {
					t.Errorf("offered %d GPUs (%v), problems %v", len(node.GPUs), err, node.Problems)
				}
			})
		})
	}
}

func TestGPUThatNeverOpensDelaysOthersByOneLimit(t *testing.T) {
	for hanging := range 3 {
		t.Run(fmt.Sprint(hanging), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h, over, began := nvidiatest.NewHost(t), make(chan struct{}), time.Now()
				const cost = 3 * time.Second
				defer func() { close(over); <-time.After(8 * cost) }()
				library := slowToOpen(h, cost, func(i int) bool { return i < hanging }, over)
				node, err := scannerOf(h, library).scan(t.Context())
				if err != nil || len(node.GPUs) != 8-hanging {
					t.Errorf("offered %d GPUs (%v), problems %v", len(node.GPUs), err, node.Problems)
				}
				if most := time.Duration(8-hanging)*cost + time.Duration(hanging)*nvmlx.CallLimit; time.Since(began) > most {
					t.Errorf("it took %s, want %s at most", time.Since(began), most)
				}
			})
		})
	}
}
