package faults

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2/ktesting"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvidiatest"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/layout"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

// The NVIDIA driver can be unloaded while claims hold partitions, once no process has NVML open.
// Without health monitoring the plugin closes NVML 5 s after its last call. After the reload the
// plugin must create the partitions again at the same placements, and report no loss.
func TestPartitionsAreRestoredAfterDriverReload(t *testing.T) {
	for name, alive := range map[string]bool{"while the plugin runs": true, "while no plugin runs": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newTestNode(t)
			must := func(what string, err error) {
				t.Helper()
				if err != nil {
					t.Fatalf("%s: %v", what, err)
				}
			}
			_, ctx := ktesting.NewTestContext(t)
			d, err := s.Start(ctx, s.api)
			must("start", err)
			defer func() { must("stop", d.Stop()) }()
			must("allocate", s.api.Allocate(ctx, parts))
			must("prepare", eventually(ctx, func(ctx context.Context) error { return d.Prepare(ctx, parts) }))

			if err := s.reload(); !errors.Is(err, state.ErrInUse) {
				t.Errorf("unloading the driver right after a Prepare: %v, want %v", err, state.ErrInUse)
			}
			if alive {
				began := time.Now()
				must("reload", eventually(ctx, func(context.Context) error { return s.reload() }))
				t.Logf("unloaded after %s", time.Since(began).Round(time.Second/10))
			} else {
				must("stop", d.Stop())
				must("reload", s.reload())
				// Delay the Node, so that the node's MIG policy arrives only after the first scan.
				s.api.Delay("get", "nodes", time.Second)
				d, err = s.Start(ctx, s.api)
				must("start again", err)
			}

			p := s.start(t)
			defer nvidiatest.StopWorkers(p.Worker)
			// The reload removed the admin's MIG instance too, and the plugin must not create it again.
			must("after the reload", eventually(ctx, observer{p, s.Node, s.api, nil}.checkAll))
			events, err := s.api.CoreV1().Events("").List(ctx, metav1.ListOptions{})
			must("list the Events", err)
			for _, e := range events.Items {
				if strings.Contains(e.Reason, "Lost") {
					t.Errorf("%s: %s", e.Reason, e.Message)
				}
			}
		})
	}
}

// reload reloads the NVIDIA driver. It fails while a process has NVML open.
func (s *testNode) reload() error {
	c, err := layout.Load(s.Root)
	if err != nil {
		return err
	}
	return s.Change(func(f *state.File) error { return c.DriverReload(f, "", "", false) })
}
