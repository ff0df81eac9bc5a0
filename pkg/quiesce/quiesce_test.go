package quiesce_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/events"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nodeview"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/quiesce"
)

// fixture has a Quiescer, and collects what it reports. Its hardware has no worker processes unless
// a test sets the function stopWorkers.
type fixture struct {
	*quiesce.Quiescer
	stopWorkers func(context.Context) error

	mu      sync.Mutex
	reports []string
	on      bool // what Metrics shows
	woken   int
	cause   string // message of the readiness condition
}

func newFixture(t *testing.T) *fixture {
	t.Helper()
	return newFixtureIn(t, t.TempDir())
}

func newFixtureIn(t *testing.T, stateDir string) *fixture {
	t.Helper()
	f := &fixture{}
	f.Quiescer = quiesce.New(t.Context(), quiesce.Options{
		Labels: []string{"nvidia.com/gpu.deploy.client"}, StateDir: stateDir,
		Access: quiesce.NewAccess(), StopWorkers: f.StopWorkers, Readiness: f, Reports: f, Released: f.Released, Wake: f.Wake,
	})
	return f
}

func (f *fixture) StopWorkers(ctx context.Context) error {
	if f.stopWorkers == nil {
		return nil
	}
	return f.stopWorkers(ctx)
}

func (f *fixture) Report(c nodeview.Condition) { f.cause = c.Message }

func (f *fixture) Clear(string) { f.cause = "" }

func (f *fixture) Event(reason events.Reason, message string) {
	f.say(reason.String() + ": " + message)
}

func (f *fixture) say(event string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.reports = append(f.reports, event)
}

func (f *fixture) Released(on bool) { f.mu.Lock(); defer f.mu.Unlock(); f.on = on }

func (f *fixture) Wake() { f.mu.Lock(); defer f.mu.Unlock(); f.woken++ }

// hangInScan runs a scan whose process hangs until gone is closed.
func (f *fixture) hangInScan(gone <-chan struct{}) {
	_, _ = f.Scan(func(context.Context) (nvidia.Node, error) {
		return nvidia.Node{}, &nvidia.HangingError{PID: 7, Gone: gone}
	})(context.Background())
}

// events returns the Events so far.
func (f *fixture) events() []string { f.mu.Lock(); defer f.mu.Unlock(); return slices.Clone(f.reports) }
func nodeWithLabel(label string) *corev1.Node {
	return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node", Labels: map[string]string{"nvidia.com/gpu.deploy.client": label}}}
}

func TestReleaseIsReportedOnceNothingHoldsGPUs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newFixture(t)
		ctx, stop := context.WithCancel(t.Context())
		watching, children, workers := make(chan struct{}), make(chan struct{}), make(chan struct{})
		r.stopWorkers = func(context.Context) error { <-workers; return nil }
		var watched atomic.Int64
		go r.Run(ctx, func(ctx context.Context) error {
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
			if said := r.events(); len(said) != 0 {
				t.Errorf("before the end of %s: %q", step.waitsFor, said)
			}
			step.end()
		}
		synctest.Wait()
		if said := r.events(); len(said) != 1 || !strings.HasPrefix(said[0], "DriverReleased: ") {
			t.Errorf("%q", said)
		}
		if _, ok := r.Use(); ok || !r.on || r.woken != 1 || !strings.Contains(r.cause, "paused-for-driver-upgrade") {
			t.Errorf("Use is allowed: %v; metric %v, reconciliation woken %d times, condition %q", ok, r.on, r.woken, r.cause)
		}
		r.Observe(nodeWithLabel("true"))
		synctest.Wait()
		if said := r.events(); len(said) != 2 || !strings.HasPrefix(said[1], "DriverTaken: ") || watched.Load() != 2 {
			t.Errorf("%q, the watcher ran %d times", said, watched.Load())
		}
		if r.on || r.woken != 2 || r.cause != "" {
			t.Errorf("after the release: metric %v, reconciliation woken %d times, condition %q", r.on, r.woken, r.cause)
		}
		stop()
		synctest.Wait()
	})
}

func TestReleaseBlockerIsReported(t *testing.T) {
	for name, holds := range map[string]func(r *fixture) error{
		"watcher": func(*fixture) error { return errors.New("process 7 hangs") },
		"scan": func(r *fixture) error {
			r.hangInScan(make(chan struct{}))
			return nil
		},
		"worker": func(r *fixture) error {
			r.stopWorkers = func(context.Context) error { return errors.New("process 7 hangs") }
			return nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newFixture(t)
				failed := holds(r)
				ctx, stop := context.WithCancel(t.Context())
				go r.Run(ctx, func(ctx context.Context) error { <-ctx.Done(); return failed })
				synctest.Wait()
				r.Observe(nodeWithLabel("true_paused-for-mig-change"))
				advance(time.Minute)
				if said := r.events(); len(said) != 1 || !strings.HasPrefix(said[0], "DriverHeld: ") || !strings.Contains(said[0], "process 7 hangs") {
					t.Errorf("%q", said)
				}
				stop()
				synctest.Wait()
			})
		})
	}
}

func TestDelayedReleaseIsReported(t *testing.T) {
	for name, holds := range map[string]func(r *fixture, ends <-chan struct{}) error{
		"watcher": func(_ *fixture, ends <-chan struct{}) error {
			return errors.Join(errors.New("of two"), fmt.Errorf("watch: %w", &nvidia.HangingError{PID: 7, Gone: ends}))
		},
		"scan": func(r *fixture, ends <-chan struct{}) error {
			r.hangInScan(ends)
			return nil
		},
		"worker": func(r *fixture, ends <-chan struct{}) error {
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
				r := newFixture(t)
				ends := make(chan struct{})
				failed := holds(r, ends)
				ctx, stop := context.WithCancel(t.Context())
				go r.Run(ctx, func(ctx context.Context) error { <-ctx.Done(); return failed })
				synctest.Wait()
				r.Observe(nodeWithLabel("true_paused-for-mig-change"))
				advance(10 * time.Minute)
				if said := r.events(); len(said) != 1 || !strings.HasPrefix(said[0], "DriverHeld: ") || !strings.Contains(said[0], "process 7 hangs") {
					t.Errorf("while it hangs: %q", said)
				}
				close(ends)
				advance(time.Minute)
				if said := r.events(); len(said) != 2 || !strings.HasPrefix(said[1], "DriverReleased: ") {
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
		r := newFixture(t)
		r.hangInScan(make(chan struct{}))
		ctx, stop := context.WithCancel(t.Context())
		var watched atomic.Int64
		go r.Run(ctx, func(ctx context.Context) error { watched.Add(1); <-ctx.Done(); return nil })
		synctest.Wait()
		r.Observe(nodeWithLabel("paused-for-driver-upgrade"))
		advance(time.Minute)
		r.Observe(nodeWithLabel("true"))
		advance(time.Hour)
		if said := r.events(); len(said) != 2 || !strings.HasPrefix(said[0], "DriverHeld: ") ||
			!strings.HasPrefix(said[1], "DriverTaken: ") || watched.Load() != 2 {
			t.Errorf("%q, the watcher ran %d times", said, watched.Load())
		}
		stop()
		synctest.Wait()
	})
}

// TestWatcherReportsTheReleaseOfAnEarlierProcess starts the plugin while the GPUs are released.
func TestWatcherReportsTheReleaseOfAnEarlierProcess(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		newFixtureIn(t, dir).Observe(nodeWithLabel("paused-for-driver-upgrade"))
		r := newFixtureIn(t, dir)
		ctx, stop := context.WithCancel(t.Context())
		var canceled []bool
		go r.Run(ctx, func(ctx context.Context) error {
			canceled = append(canceled, ctx.Err() != nil)
			<-ctx.Done()
			return nil
		})
		synctest.Wait()
		if !slices.Equal(canceled, []bool{true}) {
			t.Errorf("while the GPUs are released, watch was called with a canceled context: %v", canceled)
		}
		r.Observe(nodeWithLabel("true"))
		synctest.Wait()
		if !slices.Equal(canceled, []bool{true, false}) {
			t.Errorf("after the release, watch was called with a canceled context: %v", canceled)
		}
		stop()
		synctest.Wait()
	})
}

func advance(d time.Duration) {
	time.Sleep(d) //nolint:forbidigo // synctest's time
	synctest.Wait()
}

func TestUnreadableStoredRequestKeepsGPUsClosed(t *testing.T) {
	for name, content := range map[string]string{"damaged": "{", "of a newer version": `{"minReader":9}`} {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, "release"), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		f := newFixtureIn(t, dir)
		if done, ok := f.Use(); ok || f.cause == "" {
			done()
			t.Errorf("%s: the GPUs may be used, and the condition is %q", name, f.cause)
		}
		f.Observe(nodeWithLabel("true"))
		if done, ok := f.Use(); !ok {
			t.Errorf("%s: the GPUs stay closed although the Node requests no release", name)
		} else {
			done()
		}
	}
}
