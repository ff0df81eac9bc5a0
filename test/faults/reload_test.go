package faults

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2/ktesting"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/layout"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

// The NVIDIA driver can be unloaded while partitions are held, as soon as nobody has NVML open: the plugin, unless it listens to the GPUs' health, lets go
// of it five seconds after its last call. What the driver forgets is made again, at the same places, and nobody is told that it was lost.
func TestADriverThatIsReloadedUnderHeldPartitionsGetsThemAgain(t *testing.T) {
	for name, alive := range map[string]bool{"while the plugin runs": true, "while no plugin runs": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newStand(t)
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
				t.Errorf("right after a cut the driver could be unloaded: %v", err)
			}
			if alive {
				began := time.Now()
				must("reload", eventually(ctx, func(context.Context) error { return s.reload() }))
				t.Logf("unloaded after %s", time.Since(began).Round(time.Second/10))
			} else {
				must("stop", d.Stop())
				must("reload", s.reload())
				s.api.Slowly("get", "nodes", time.Second) // what may be done about GPUs is known later than how they are
				d, err = s.Start(ctx, s.api)
				must("start again", err)
			}

			p := s.start(t)
			defer p.Cuts.Close()
			// The admin's instance is forgotten too, and nobody makes that again.
			must("after the reload", eventually(ctx, outside{p, s.Host, s.api, nil}.agreeAll))
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

// reload loads the driver anew, unless a process has NVML open.
func (s *stand) reload() error {
	c, err := layout.Load(s.Root)
	if err != nil {
		return err
	}
	return s.Change(func(f *state.File) error { return c.DriverReload(f, "", "", false) })
}
