package driver

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clienttesting "k8s.io/client-go/testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nodeview"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

// editNode replaces the Node's labels and annotations.
func (n *healthNode) editNode(t *testing.T, labels, annotations map[string]string) {
	t.Helper()
	node, err := n.client.CoreV1().Nodes().Get(t.Context(), "node", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	node.Labels, node.Annotations = labels, annotations
	if _, err := n.client.CoreV1().Nodes().Update(t.Context(), node, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
}

func (n *healthNode) watching() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.emit != nil
}

func TestGPUsAreReleasedOnRequest(t *testing.T) {
	for name, ask := range map[string][2]map[string]string{
		"by annotation": {nil, {"gpu.nvidia.com/release-driver": "true"}},
		"by label":      {{"nvidia.com/gpu.deploy.dra-driver": "paused-for-driver-upgrade"}, nil},
		"as a client":   {{"nvidia.com/gpu.deploy.client": "custom_paused-for-driver-upgrade"}, nil},
		"for MIG":       {{"nvidia.com/gpu.deploy.device-plugin": "paused-for-mig-change"}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			n := newHealthNode(t)
			var scans atomic.Int64
			scan := func() (nvidia.Node, error) { scans.Add(1); return twoGPUs() }
			n.setHardware("driver", scan)
			n.run(t)
			n.register(t)
			held, late := n.claim(t, "held", firstGPU), n.claim(t, "late", secondGPU)
			eventually(t, "a claim is prepared", func() bool { return n.prepare(t, held).GetError() == "" })

			n.editNode(t, ask[0], ask[1])
			eventually(t, "the watcher stopped", func() bool { return !n.watching() })
			eventually(t, "Prepare is refused with the reason", func() bool {
				return strings.Contains(n.prepare(t, late).GetError(), "released for a driver upgrade")
			})
			before := scans.Load()
			n.setHardware("another driver", scan)
			if msg := n.unprepare(t, held); msg != "" {
				t.Errorf("a claim cannot be unprepared: %s", msg)
			}
			eventually(t, "the Node has an Event", func() bool {
				return n.hasEvent(t, "Node", "node", "DriverReleased", "asks for it") || n.hasEvent(t, "Node", "node", "DriverReleased", "paused")
			})
			eventually(t, "the inventory is not ready", func() bool {
				return strings.Contains(n.driver.inv.Snapshot().Reason, "released for a driver upgrade")
			})
			if now := scans.Load(); now != before {
				t.Errorf("the hardware was scanned %d times", now-before)
			}
			if len(published(t, n.client)) != 2 {
				t.Error("the devices were withdrawn")
			}

			n.editNode(t, nil, nil)
			eventually(t, "the watcher runs", n.watching)
			eventually(t, "claims are prepared", func() bool { return n.prepare(t, late).GetError() == "" })
			if scans.Load() == before {
				t.Error("the hardware was not scanned")
			}
			n.recovery("0000:1b:00.0", device.RecoveryNone)
			if msg := n.unprepare(t, late); msg != "" {
				t.Error(msg)
			}
		})
	}
}

// newTestQuiescer returns a quiescer r. reports returns the calls of its onChange and onBlocked so
// far, as text.
func newTestQuiescer(t *testing.T) (r *quiescer, reports func() []string) {
	t.Helper()
	r = newQuiescer()
	r.readiness = nodeview.NewReadiness(&fakeInventory{}, func() {})
	r.labels = []string{"nvidia.com/gpu.deploy.client"}
	var mu sync.Mutex
	var all []string
	say := func(s string) { mu.Lock(); defer mu.Unlock(); all = append(all, s) }
	r.onChange = func(on bool, reason string) { say(fmt.Sprintf("%v %s", on, reason)) }
	r.onBlocked = func(err error) { say("blocked: " + err.Error()) }
	return r, func() []string { mu.Lock(); defer mu.Unlock(); return slices.Clone(all) }
}

func nodeWithLabel(label string) *corev1.Node {
	return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node", Labels: map[string]string{"nvidia.com/gpu.deploy.client": label}}}
}

func TestReleaseIsReportedOnceNothingHoldsGPUs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, reports := newTestQuiescer(t)
		ctx, stop := context.WithCancel(t.Context())
		watching, children, workers := make(chan struct{}), make(chan struct{}), make(chan struct{})
		r.stopWorkers = func(context.Context) error { <-workers; return nil }
		var watched atomic.Int64
		go r.RunUnlessQuiesced(ctx, func(ctx context.Context) error {
			watched.Add(1)
			<-ctx.Done()
			<-watching
			return nil
		})
		scan := r.Scan(func(ctx context.Context) (nvidia.Node, error) {
			<-ctx.Done()
			return nvidia.Node{}, &nvidia.HangingError{PID: 1, Gone: children}
		})
		go func() { _, _ = scan(ctx) }()
		synctest.Wait()
		done, ok := r.Use()
		if !ok {
			t.Error("Use is refused")
		}

		r.Observe(nodeWithLabel("paused-for-driver-upgrade"))
		for _, step := range []struct {
			waitsFor string
			end      func()
		}{
			{"the watcher", func() { close(watching) }},
			{"a use of the hardware", done},
			{"a killed scan", func() { close(children) }},
			{"a partition worker", func() { close(workers) }},
		} {
			synctest.Wait()
			if said := reports(); len(said) != 0 {
				t.Errorf("before the end of %s: %q", step.waitsFor, said)
			}
			step.end()
		}
		synctest.Wait()
		if said := reports(); len(said) != 1 || !strings.HasPrefix(said[0], "true ") {
			t.Errorf("%q", said)
		}
		if _, ok := r.Use(); ok {
			t.Error("Use is allowed")
		}
		r.Observe(nodeWithLabel("true"))
		synctest.Wait()
		if said := reports(); len(said) != 2 || said[1] != "false " || watched.Load() != 2 {
			t.Errorf("%q, the watcher ran %d times", said, watched.Load())
		}
		stop()
		synctest.Wait()
	})
}

func TestReleaseBlockerIsReported(t *testing.T) {
	for name, holds := range map[string]func(r *quiescer) error{
		"watcher": func(*quiescer) error { return errors.New("process 7 hangs") },
		"scan": func(r *quiescer) error {
			r.trackHanging(&nvidia.HangingError{PID: 7, Gone: make(chan struct{})})
			return nil
		},
		"worker": func(r *quiescer) error {
			r.stopWorkers = func(context.Context) error { return errors.New("process 7 hangs") }
			return nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r, reports := newTestQuiescer(t)
				failed := holds(r)
				ctx, stop := context.WithCancel(t.Context())
				go r.RunUnlessQuiesced(ctx, func(ctx context.Context) error { <-ctx.Done(); return failed })
				synctest.Wait()
				r.Observe(nodeWithLabel("true_paused-for-mig-change"))
				advance(time.Minute)
				if said := reports(); len(said) != 1 || !strings.HasPrefix(said[0], "blocked: ") || !strings.Contains(said[0], "process 7 hangs") {
					t.Errorf("%q", said)
				}
				stop()
				synctest.Wait()
			})
		})
	}
}

func TestDelayedReleaseIsReported(t *testing.T) {
	for name, holds := range map[string]func(r *quiescer, ends <-chan struct{}) error{
		"watcher": func(_ *quiescer, ends <-chan struct{}) error {
			return errors.Join(errors.New("of two"), fmt.Errorf("watch: %w", &nvidia.HangingError{PID: 7, Gone: ends}))
		},
		"scan": func(r *quiescer, ends <-chan struct{}) error {
			r.trackHanging(&nvidia.HangingError{PID: 7, Gone: ends})
			return nil
		},
		"worker": func(r *quiescer, ends <-chan struct{}) error {
			r.stopWorkers = func(context.Context) error {
				select {
				case <-ends:
					return nil
				default:
					return errors.New("process 7 hangs")
				}
			}
			return nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r, reports := newTestQuiescer(t)
				ends := make(chan struct{})
				failed := holds(r, ends)
				ctx, stop := context.WithCancel(t.Context())
				go r.RunUnlessQuiesced(ctx, func(ctx context.Context) error { <-ctx.Done(); return failed })
				synctest.Wait()
				r.Observe(nodeWithLabel("true_paused-for-mig-change"))
				advance(10 * time.Minute)
				if said := reports(); len(said) != 1 || !strings.HasPrefix(said[0], "blocked: ") || !strings.Contains(said[0], "process 7 hangs") {
					t.Errorf("while it hangs: %q", said)
				}
				close(ends)
				advance(maxBlockedPause + processExitTimeout)
				if said := reports(); len(said) != 2 || !strings.HasPrefix(said[1], "true ") {
					t.Errorf("after that: %q", said)
				}
				stop()
				synctest.Wait()
			})
		})
	}
}

func TestWithdrawnReleaseRequestEndsTheWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, reports := newTestQuiescer(t)
		r.trackHanging(&nvidia.HangingError{PID: 7, Gone: make(chan struct{})})
		ctx, stop := context.WithCancel(t.Context())
		var watched atomic.Int64
		go r.RunUnlessQuiesced(ctx, func(ctx context.Context) error { watched.Add(1); <-ctx.Done(); return nil })
		synctest.Wait()
		r.Observe(nodeWithLabel("paused-for-driver-upgrade"))
		advance(time.Minute)
		r.Observe(nodeWithLabel("true"))
		advance(time.Hour)
		if said := reports(); len(said) != 2 || !strings.HasPrefix(said[0], "blocked: ") || said[1] != "false " || watched.Load() != 2 {
			t.Errorf("%q, the watcher ran %d times", said, watched.Load())
		}
		stop()
		synctest.Wait()
	})
}

func TestStartDuringReleaseDoesNotOpenGPUs(t *testing.T) {
	for name, ask := range map[string]func(*healthNode){
		"asked": func(n *healthNode) { n.editNode(t, nil, map[string]string{"gpu.nvidia.com/release-driver": "true"}) },
		"remembered": func(n *healthNode) {
			newQuiesceStore(n.cfg.StateDir(), func(err error) { t.Error(err) }).Save("it was asked for")
			prependReactor(n.client, "*", "nodes", func(clienttesting.Action) (bool, runtime.Object, error) {
				return true, nil, apierrors.NewServiceUnavailable("away")
			})
		},
	} {
		t.Run(name, func(t *testing.T) {
			n := newHealthNode(t)
			ask(n)
			var taken atomic.Int64
			n.setHardware("driver", func() (nvidia.Node, error) { taken.Add(1); return twoGPUs() })
			n.startPlugin(t)
			eventually(t, "an Event reports the release", func() bool {
				return n.hasEvent(t, "Node", "node", "DriverReleased", "asked for") || n.hasEvent(t, "Node", "node", "DriverReleased", "asks for")
			})
			eventually(t, "the inventory is not ready", func() bool {
				return strings.Contains(n.driver.inv.Snapshot().Reason, "released for a driver upgrade")
			})
			eventually(t, "it serves the kubelet", func() bool { return n.driver.helper.Load() != nil })
			n.register(t)
			if msg := n.prepare(t, n.claim(t, "early", firstGPU)).GetError(); !strings.Contains(msg, "released for a driver upgrade") {
				t.Errorf("a claim was prepared: %q", msg)
			}
			if err := n.driver.repairSpecs(t.Context()); err != nil || !n.driver.specsUnchecked.Load() || !n.driver.unrecovered.Load() {
				t.Errorf("held claims were checked: %v", err)
			}
			if taken.Load() != 0 || n.watching() {
				t.Errorf("the hardware was scanned %d times; watching: %v", taken.Load(), n.watching())
			}
			if name != "asked" {
				return
			}
			n.editNode(t, nil, nil)
			eventually(t, "the watcher runs", n.watching)
			eventually(t, "postponed work is done", func() bool { return !n.driver.specsUnchecked.Load() && !n.driver.unrecovered.Load() })
			if reason, err := newQuiesceStore(n.cfg.StateDir(), nil).Load(); err != nil || reason != "" {
				t.Errorf("%q, %v", reason, err)
			}
		})
	}
}
