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
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
)

// change edits the Node.
func (n *ailing) change(t *testing.T, labels, annotations map[string]string) {
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

func (n *ailing) listens() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.tell != nil
}

func TestTheHardwareIsLetGoOf(t *testing.T) {
	for name, ask := range map[string][2]map[string]string{
		"by annotation": {nil, {"gpu.nvidia.com/release-driver": "true"}},
		"by label":      {{"nvidia.com/gpu.deploy.dra-driver": "paused-for-driver-upgrade"}, nil},
		"as a client":   {{"nvidia.com/gpu.deploy.client": "custom_paused-for-driver-upgrade"}, nil},
		"for MIG":       {{"nvidia.com/gpu.deploy.device-plugin": "paused-for-mig-change"}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			n := newAiling(t)
			var scans atomic.Int64
			scan := func() (nvidia.Node, error) { scans.Add(1); return twoGPUs() }
			n.say("driver", scan)
			n.run(t)
			n.register(t)
			held, late := n.claim(t, "held", firstGPU), n.claim(t, "late", secondGPU)
			eventually(t, "a claim is prepared", func() bool { return n.prepare(t, held).GetError() == "" })

			n.change(t, ask[0], ask[1])
			eventually(t, "nobody listens", func() bool { return !n.listens() })
			eventually(t, "nothing is prepared, and it is said why", func() bool { return strings.Contains(n.prepare(t, late).GetError(), "let go of") })
			before := scans.Load()
			n.say("another driver", scan)
			if msg := n.unprepare(t, held); msg != "" {
				t.Errorf("a claim cannot be given back: %s", msg)
			}
			eventually(t, "the Node has an Event", func() bool {
				return n.hasEvent(t, "Node", "node", "DriverReleased", "asks for it") || n.hasEvent(t, "Node", "node", "DriverReleased", "paused")
			})
			eventually(t, "the inventory has noticed", func() bool { return strings.Contains(n.driver.inv.Snapshot().Reason, "let go of") })
			if now := scans.Load(); now != before {
				t.Errorf("the hardware was looked at %d times", now-before)
			}
			if len(published(t, n.client)) != 2 {
				t.Error("the devices are withdrawn")
			}

			n.change(t, nil, nil)
			eventually(t, "somebody listens", n.listens)
			eventually(t, "claims are prepared", func() bool { return n.prepare(t, late).GetError() == "" })
			if scans.Load() == before {
				t.Error("the hardware was not looked at")
			}
			n.recovery("0000:1b:00.0", device.RecoveryNone)
			if msg := n.unprepare(t, late); msg != "" {
				t.Error(msg)
			}
		})
	}
}

// letting is a release whose Node a test changes.
func letting(t *testing.T) (r *release, told func() []string) {
	t.Helper()
	r = newRelease()
	r.readiness = newReadiness(&fakeInventory{}, func() {})
	r.labels = []string{"nvidia.com/gpu.deploy.client"}
	var mu sync.Mutex
	var all []string
	say := func(s string) { mu.Lock(); defer mu.Unlock(); all = append(all, s) }
	r.told = func(on bool, reason string) { say(fmt.Sprintf("%v %s", on, reason)) }
	r.held = func(err error) { say("held: " + err.Error()) }
	return r, func() []string { mu.Lock(); defer mu.Unlock(); return slices.Clone(all) }
}

func asking(label string) *corev1.Node {
	return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node", Labels: map[string]string{"nvidia.com/gpu.deploy.client": label}}}
}

func TestThatTheHardwareIsLetGoOfIsToldWhenItIs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, told := letting(t)
		ctx, stop := context.WithCancel(t.Context())
		watching, children, cutting := make(chan struct{}), make(chan struct{}), make(chan struct{})
		r.workers = func(context.Context) error { <-cutting; return nil }
		var listening atomic.Int64
		go r.While(ctx, func(ctx context.Context) error {
			listening.Add(1)
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
			t.Error("nobody may use it")
		}

		r.See(asking("paused-for-driver-upgrade"))
		for _, step := range []struct {
			waitsFor string
			end      func()
		}{
			{"who listens", func() { close(watching) }},
			{"a comparison that is under way", done},
			{"a scan that was killed", func() { close(children) }},
			{"a worker that cuts", func() { close(cutting) }},
		} {
			synctest.Wait()
			if said := told(); len(said) != 0 {
				t.Errorf("before the end of %s: %q", step.waitsFor, said)
			}
			step.end()
		}
		synctest.Wait()
		if said := told(); len(said) != 1 || !strings.HasPrefix(said[0], "true ") {
			t.Errorf("%q", said)
		}
		if _, ok := r.Use(); ok {
			t.Error("it may be used")
		}
		r.See(asking("true"))
		synctest.Wait()
		if said := told(); len(said) != 2 || said[1] != "false " || listening.Load() != 2 {
			t.Errorf("%q, listened %d times", said, listening.Load())
		}
		stop()
		synctest.Wait()
	})
}

func TestWhatKeepsTheHardwareIsTold(t *testing.T) {
	for name, holds := range map[string]func(r *release) error{
		"who listens": func(*release) error { return errors.New("process 7 hangs") },
		"a scan": func(r *release) error {
			r.remain(&nvidia.HangingError{PID: 7, Gone: make(chan struct{})})
			return nil
		},
		"a worker": func(r *release) error {
			r.workers = func(context.Context) error { return errors.New("process 7 hangs") }
			return nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r, told := letting(t)
				failed := holds(r)
				ctx, stop := context.WithCancel(t.Context())
				go r.While(ctx, func(ctx context.Context) error { <-ctx.Done(); return failed })
				synctest.Wait()
				r.See(asking("true_paused-for-mig-change"))
				passes(time.Minute)
				if said := told(); len(said) != 1 || !strings.HasPrefix(said[0], "held: ") || !strings.Contains(said[0], "process 7 hangs") {
					t.Errorf("%q", said)
				}
				stop()
				synctest.Wait()
			})
		})
	}
}

func TestThatTheHardwareIsLetGoOfIsToldAlsoWhereThatTookLong(t *testing.T) {
	for name, holds := range map[string]func(r *release, ends <-chan struct{}) error{
		"who listens": func(_ *release, ends <-chan struct{}) error {
			return errors.Join(errors.New("of two"), fmt.Errorf("watch: %w", &nvidia.HangingError{PID: 7, Gone: ends}))
		},
		"a scan": func(r *release, ends <-chan struct{}) error {
			r.remain(&nvidia.HangingError{PID: 7, Gone: ends})
			return nil
		},
		"a worker": func(r *release, ends <-chan struct{}) error {
			r.workers = func(context.Context) error {
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
				r, told := letting(t)
				ends := make(chan struct{})
				failed := holds(r, ends)
				ctx, stop := context.WithCancel(t.Context())
				go r.While(ctx, func(ctx context.Context) error { <-ctx.Done(); return failed })
				synctest.Wait()
				r.See(asking("true_paused-for-mig-change"))
				passes(10 * time.Minute)
				if said := told(); len(said) != 1 || !strings.HasPrefix(said[0], "held: ") || !strings.Contains(said[0], "process 7 hangs") {
					t.Errorf("while it hangs: %q", said)
				}
				close(ends)
				passes(heldMost + endLimit)
				if said := told(); len(said) != 2 || !strings.HasPrefix(said[1], "true ") {
					t.Errorf("after that: %q", said)
				}
				stop()
				synctest.Wait()
			})
		})
	}
}

func TestTheHardwareThatIsNotAskedForAnyMoreIsNotWaitedFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, told := letting(t)
		r.remain(&nvidia.HangingError{PID: 7, Gone: make(chan struct{})})
		ctx, stop := context.WithCancel(t.Context())
		var listening atomic.Int64
		go r.While(ctx, func(ctx context.Context) error { listening.Add(1); <-ctx.Done(); return nil })
		synctest.Wait()
		r.See(asking("paused-for-driver-upgrade"))
		passes(time.Minute)
		r.See(asking("true"))
		passes(time.Hour)
		if said := told(); len(said) != 2 || !strings.HasPrefix(said[0], "held: ") || said[1] != "false " || listening.Load() != 2 {
			t.Errorf("%q, listened %d times", said, listening.Load())
		}
		stop()
		synctest.Wait()
	})
}

func TestAPluginThatStartsTakesNothing(t *testing.T) {
	for name, ask := range map[string]func(*ailing){
		"asked": func(n *ailing) { n.change(t, nil, map[string]string{"gpu.nvidia.com/release-driver": "true"}) },
		"remembered": func(n *ailing) {
			newReleaseMemory(n.cfg.StateDir(), func(err error) { t.Error(err) }).Keep("it was asked for")
			n.client.PrependReactor("*", "nodes", func(clienttesting.Action) (bool, runtime.Object, error) {
				return true, nil, apierrors.NewServiceUnavailable("away")
			})
		},
	} {
		t.Run(name, func(t *testing.T) {
			n := newAiling(t)
			ask(n)
			var taken atomic.Int64
			n.say("driver", func() (nvidia.Node, error) { taken.Add(1); return twoGPUs() })
			n.begin(t)
			eventually(t, "it says that it has let go", func() bool {
				return n.hasEvent(t, "Node", "node", "DriverReleased", "asked for") || n.hasEvent(t, "Node", "node", "DriverReleased", "asks for")
			})
			eventually(t, "the inventory has noticed", func() bool { return strings.Contains(n.driver.inv.Snapshot().Reason, "let go of") })
			eventually(t, "it serves the kubelet", func() bool { return n.driver.helper.Load() != nil })
			n.register(t)
			if msg := n.prepare(t, n.claim(t, "early", firstGPU)).GetError(); !strings.Contains(msg, "let go of") {
				t.Errorf("a claim is prepared: %q", msg)
			}
			if err := n.driver.mend(t.Context()); err != nil || !n.driver.unmended.Load() || !n.driver.unrecovered.Load() {
				t.Errorf("what held claims have is looked at: %v", err)
			}
			if taken.Load() != 0 || n.listens() {
				t.Errorf("the hardware was looked at %d times; somebody listens: %v", taken.Load(), n.listens())
			}
			if name != "asked" {
				return
			}
			n.change(t, nil, nil)
			eventually(t, "somebody listens", n.listens)
			eventually(t, "what was put off is done", func() bool { return !n.driver.unmended.Load() && !n.driver.unrecovered.Load() })
			if reason, err := newReleaseMemory(n.cfg.StateDir(), nil).Last(); err != nil || reason != "" {
				t.Errorf("%q, %v", reason, err)
			}
		})
	}
}
