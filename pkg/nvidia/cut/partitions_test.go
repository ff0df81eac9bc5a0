package cut

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"golang.org/x/sys/unix"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/host"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/scan"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvidiatest"
)

func TestMain(m *testing.M) {
	nvidiatest.Main(m, map[string]func() error{
		"scan":      func() error { return scan.Serve(context.Background(), os.Stdin, os.Stdout) },
		"partition": func() error { return Serve(os.Stdin, os.Stdout) },
		"worker":    runFakeWorker,
	})
}

// runFakeWorker is a fake worker process. The UUID of the requested card names how it behaves. Its
// answers have its process ID in the field Minor.
func runFakeWorker() error {
	decoder, encoder := json.NewDecoder(os.Stdin), json.NewEncoder(os.Stdout)
	var p nvidia.Paths
	if err := decoder.Decode(&p); err != nil {
		return err
	}
	for busy := 0; ; {
		var r request
		if err := decoder.Decode(&r); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		a := answer{State: device.CardState{Minor: os.Getpid()}}
		switch r.Card.UUID {
		case "hangs":
			select {}
		case "dies":
			fmt.Fprintln(os.Stderr, "symbol lookup error")
			os.Exit(127) //nolint:forbidigo // this process is the child of a test
		case "prints nonsense":
			fmt.Println("hello") //nolint:forbidigo // this process is the child of a test
		case "waits": // until a reader opens the gate
			_, _ = os.ReadFile(filepath.Join(p.Proc, "gate"))
		case "busy":
			if busy++; busy < 3 {
				a = answer{Error: busyError(r)}
			}
		case "always busy":
			a = answer{Error: busyError(r)}
		case "broken":
			a = answer{Error: r.fail(device.FailureOther, "NVML error 12345")}
		case "registering":
			if r.Op == opFabric {
				if busy++; busy < 3 {
					a = answer{Waiting: "still registering"}
				}
			}
		case "never registers":
			if r.Op == opFabric {
				a = answer{Waiting: "still registering"}
			}
		}
		_ = encoder.Encode(a)
	}
}

func busyError(r request) *nvidia.Error {
	e := r.fail(device.FailureInUse, "in use")
	e.Transient = true
	return e
}

func newPartitions(t *testing.T) *Partitions {
	t.Helper()
	t.Setenv(nvidiatest.RoleVariable, "worker")
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	p := New(nvidia.Paths{State: t.TempDir(), Proc: t.TempDir()}, nil, self)
	t.Cleanup(func() { nvidiatest.StopWorkers(p) })
	return p
}

// gpu returns a card whose UUID is behaves, which names what the fake worker does with requests for
// this card.
func gpu(n int, behaves string) device.Card {
	return device.Card{PCIAddress: device.PCIAddress(fmt.Sprintf("0000:%02x:00.0", n)), UUID: behaves}
}

// workerPID returns the process ID of the fake worker that serves the card.
func workerPID(t *testing.T, p *Partitions, c device.Card) int {
	t.Helper()
	s, err := p.Look(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	return s.Minor
}

func codeOf(err error) device.FailureCode {
	var failed *nvidia.Error
	if errors.As(err, &failed) {
		return failed.Code
	}
	return ""
}

func TestCallsOnOneGPUShareWorker(t *testing.T) {
	p := newPartitions(t)
	first := workerPID(t, p, gpu(1, "well"))
	if again := workerPID(t, p, gpu(1, "well")); again != first {
		t.Errorf("process %d, then %d", first, again)
	}
	if other := workerPID(t, p, gpu(2, "well")); other == first {
		t.Error("another GPU shares the worker")
	}
}

func TestNextCallWorksAfterTimeout(t *testing.T) {
	p := newPartitions(t)
	ctx, cancel := context.WithTimeout(t.Context(), nvidiatest.HangLimit)
	defer cancel()
	_, err := p.Look(ctx, gpu(1, "hangs"))
	if codeOf(err) != device.FailureTimeout || !errors.Is(err, context.DeadlineExceeded) ||
		!strings.Contains(err.Error(), "gpu-0000-01-00-0") {
		t.Errorf("error is %v", err)
	}
	workerPID(t, p, gpu(1, "well"))
}

func TestDeadWorkerIsReplaced(t *testing.T) {
	p := newPartitions(t)
	before := workerPID(t, p, gpu(1, "well"))
	for behaves, says := range map[string]string{"dies": "symbol lookup error", "prints nonsense": "read its answer"} {
		if _, err := p.Look(t.Context(), gpu(1, behaves)); codeOf(err) != device.FailureDied || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v", behaves, err)
		}
		if after := workerPID(t, p, gpu(1, "well")); after == before {
			t.Error("the worker still runs")
		}
	}
}

func TestFailureStartsNewWorker(t *testing.T) {
	p := newPartitions(t)
	before := workerPID(t, p, gpu(1, "well"))
	if _, err := p.Look(t.Context(), gpu(1, "broken")); codeOf(err) != device.FailureOther {
		t.Error(err)
	}
	if after := workerPID(t, p, gpu(1, "well")); after == before {
		t.Error("the worker was not replaced")
	}
}

func TestHungGPUDoesNotBlockOthers(t *testing.T) {
	p := newPartitions(t)
	gate := filepath.Join(p.paths.Proc, "gate")
	if err := unix.Mkfifo(gate, 0o600); err != nil {
		t.Fatal(err)
	}
	var done sync.WaitGroup
	done.Go(func() {
		if _, err := p.Look(t.Context(), gpu(1, "waits")); err != nil {
			t.Error(err)
		}
	})
	opened, err := os.OpenFile(gate, os.O_WRONLY, 0) // returns when the worker waits
	if err != nil {
		t.Fatal(err)
	}
	workerPID(t, p, gpu(2, "well"))
	ctx, cancel := context.WithTimeout(t.Context(), nvidiatest.HangLimit)
	defer cancel()
	if _, err := p.Look(ctx, gpu(1, "well")); codeOf(err) != device.FailureTimeout || !strings.Contains(err.Error(), "nothing was done") {
		t.Errorf("a second call on the GPU: %v", err)
	}
	_ = opened.Close()
	done.Wait()
	workerPID(t, p, gpu(1, "well"))
}

func TestIdleWorkerEnds(t *testing.T) {
	p := newPartitions(t)
	p.idle = nvidiatest.HangLimit
	workerPID(t, p, gpu(1, "well"))
	<-p.slots["0000:01:00.0"].worker.Gone
	workerPID(t, p, gpu(1, "well"))
}

func TestUnkillableWorkerBlocksNewWorker(t *testing.T) {
	p := newPartitions(t)
	workerPID(t, p, gpu(1, "well"))
	w := p.slots["0000:01:00.0"].worker
	killed, gone := make(chan struct{}), make(chan struct{})
	close(killed)
	p.slots["0000:01:00.0"].worker = &worker{PID: w.PID, Killed: killed, Gone: gone}
	ctx, cancel := context.WithTimeout(t.Context(), nvidiatest.HangLimit)
	defer cancel()
	if _, err := p.Look(ctx, gpu(1, "well")); codeOf(err) != device.FailureTimeout ||
		!strings.Contains(err.Error(), "still hangs in the NVIDIA driver") {
		t.Errorf("error is %v", err)
	}
	close(gone)
	workerPID(t, p, gpu(1, "well"))
	w.Kill()
}

// The instance of card "busy" is free at the third attempt. All attempts are one operation for the
// observer.
func TestDestroyRetriesBusyInstance(t *testing.T) {
	p := newPartitions(t)
	var mu sync.Mutex
	var seen []string
	p.observe = func(op string, _ time.Duration, code string) {
		mu.Lock()
		defer mu.Unlock()
		seen = append(seen, op+" "+code)
	}
	if err := p.Destroy(t.Context(), gpu(1, "busy"), device.Instance{}); err != nil {
		t.Error(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if err := p.Destroy(ctx, gpu(1, "always busy"), device.Instance{}); codeOf(err) != device.FailureInUse {
		t.Error(err)
	}
	if want := []string{"destroy ", "destroy " + string(device.FailureInUse)}; !slices.Equal(seen, want) {
		t.Errorf("observed %q, want %q", seen, want)
	}
}

// until returns a context that ends when p has finished the operation and failure code in answer,
// such as "fabric " for a fabric operation that succeeded.
func (p *Partitions) until(t *testing.T, answer string) (context.Context, context.CancelFunc) {
	t.Helper()
	ctx, cancel := context.WithCancelCause(t.Context())
	p.observe = func(op string, _ time.Duration, code string) {
		if op+" "+code == answer {
			cancel(context.DeadlineExceeded)
		}
	}
	return ctx, func() { cancel(nil) }
}

func TestSetModeWaitsForFabric(t *testing.T) {
	p := newPartitions(t)
	if _, err := p.SetMode(t.Context(), gpu(1, "registering"), false); err != nil {
		t.Error(err)
	}
	ctx, cancel := p.until(t, "fabric ")
	defer cancel()
	if _, err := p.SetMode(ctx, gpu(1, "never registers"), false); codeOf(err) != device.FailureTimeout ||
		!strings.Contains(err.Error(), "fabricmanager") || !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
	if _, err := p.SetMode(t.Context(), gpu(2, "never registers"), true); err != nil {
		t.Error(err)
	}
}

func TestMissingWorkerProgramIsAnError(t *testing.T) {
	p := newPartitions(t)
	p.command = []string{"/nonexistent"}
	if _, err := p.Look(t.Context(), gpu(2, "well")); codeOf(err) != device.FailureOther ||
		!strings.Contains(err.Error(), "start the worker") {
		t.Error(err)
	}
}

func TestWorkerEndsWithParentDuringCall(t *testing.T) {
	p := newPartitions(t)
	t.Setenv(nvidiatest.RoleVariable, "partition")
	lookAtNothing, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if _, err := p.Look(lookAtNothing, gpu(1, "well")); codeOf(err) != device.FailureNoDriver {
		t.Errorf("without a driver: %v", err)
	}
	h := nvidiatest.NewHost(t)
	cards := nvidiatest.TwoCards()
	cards[1].Hangs = "nvmlDeviceGetUUID"
	in, parent := io.Pipe()
	called := make(chan struct{})
	served := make(chan error)
	go func() {
		served <- serve(in, io.Discard, func(nvidia.Paths) (nvml.Interface, error) {
			close(called)
			return nvidiatest.NVML(cards...), nil
		})
	}()
	for _, line := range []any{h.Paths(), request{Op: opLook, Card: device.Card{PCIAddress: "0000:1b:00.0", UUID: "x"}}} {
		if err := json.NewEncoder(parent).Encode(line); err != nil {
			t.Fatal(err)
		}
	}
	<-called
	_ = parent.Close()
	if err := <-served; err != nil {
		t.Error(err)
	}
	if err := Serve(strings.NewReader("no JSON"), io.Discard); err == nil {
		t.Error("invalid JSON was accepted")
	}
}

func TestOneWorkerPerCard(t *testing.T) {
	h := nvidiatest.NewHost(t)
	p := h.Paths().WithDefaults()
	held, err := host.LockCard(p, "0000:1b:00.0")
	if err != nil {
		t.Fatal(err)
	}
	taken := make(chan struct{})
	go func() {
		defer close(taken)
		again, err := host.LockCard(p, "0000:1b:00.0")
		if err != nil {
			t.Error(err)
			return
		}
		_ = again.Close()
	}()
	other, err := host.LockCard(p, "0000:c3:00.0")
	if err != nil {
		t.Fatal(err)
	}
	_ = other.Close()
	select {
	case <-taken:
		t.Error("two workers have the lock")
	default:
	}
	_ = held.Close()
	<-taken
	gone, err := host.LockCard(p, "0000:99:00.0") // NVML reports that the card is gone
	if err != nil {
		t.Fatal(err)
	}
	_ = gone.Close()
}

func TestOtherUsersCannotLockACard(t *testing.T) {
	h := nvidiatest.NewHost(t)
	p := h.Paths().WithDefaults()
	first, err := host.LockCard(p, "0000:1b:00.0")
	if err != nil {
		t.Fatal(err)
	}
	_ = first.Close()
	sysfs, err := filepath.EvalSymlinks(filepath.Join(p.Sysfs, "bus/pci/devices/0000:1b:00.0"))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(sysfs, 0o755); err != nil { // as in sysfs
		t.Fatal(err)
	}
	err = filepath.WalkDir(h.Root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := entry.Info()
		if err != nil || info.Mode().Perm()&0o004 == 0 || !info.IsDir() && !info.Mode().IsRegular() {
			return err
		}
		foreign, err := os.Open(path)
		if err != nil {
			return err
		}
		t.Cleanup(func() { _ = foreign.Close() })
		return unix.Flock(int(foreign.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	})
	if err != nil {
		t.Fatal(err)
	}
	locked := make(chan error, 1)
	go func() {
		again, err := host.LockCard(p, "0000:1b:00.0")
		_ = again.Close()
		locked <- err
	}()
	select {
	case err := <-locked:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(nvidiatest.Patience):
		t.Error("another user's lock keeps the card locked")
	}
}

func TestACardsLockOutlivesItsFile(t *testing.T) {
	h := nvidiatest.NewHost(t)
	p := h.Paths().WithDefaults()
	held, err := host.LockCard(p, "0000:1b:00.0")
	if err != nil {
		t.Fatal(err)
	}
	waits := make(chan *os.File, 1)
	go func() {
		next, err := host.LockCard(p, "0000:1b:00.0")
		if err != nil {
			t.Error(err)
		}
		waits <- next
	}()
	awaitWaiter(t, held)
	if err := os.Remove(held.Name()); err != nil {
		t.Fatal(err)
	}
	_ = held.Close()
	next := <-waits
	there, err := os.Stat(next.Name())
	if err != nil {
		t.Fatal(err)
	}
	if mine, err := next.Stat(); err != nil || !os.SameFile(mine, there) {
		t.Error("the lock is on a file that later workers do not find", err)
	}
	_ = next.Close()
}

// awaitWaiter returns when another open file waits for the flock of held.
func awaitWaiter(t *testing.T, held *os.File) {
	t.Helper()
	info, err := held.Stat()
	if err != nil {
		t.Fatal(err)
	}
	waiter := regexp.MustCompile(fmt.Sprintf(`-> FLOCK .*:%d `, info.Sys().(*syscall.Stat_t).Ino))
	tick, late := time.NewTicker(time.Millisecond), time.After(nvidiatest.Patience)
	defer tick.Stop()
	for {
		if locks, err := os.ReadFile("/proc/locks"); err != nil || waiter.Match(locks) {
			return
		}
		select {
		case <-tick.C:
		case <-late:
			t.Fatal("no file waits for the lock")
		}
	}
}

func TestStopWorkers(t *testing.T) {
	p := newPartitions(t)
	p.idle = time.Hour
	first := workerPID(t, p, gpu(1, "well"))
	idle := p.slots["0000:01:00.0"].worker
	if err := p.StopWorkers(t.Context()); err != nil {
		t.Fatal(err)
	}
	select {
	case <-idle.Gone:
	default:
		t.Error("a worker still runs after StopWorkers")
	}
	if again := workerPID(t, p, gpu(1, "well")); again == first {
		t.Error("the same process answered")
	}
	busy := p.slot("0000:02:00.0").busy
	busy <- struct{}{} // a call is in flight
	defer func() { <-busy }()
	short, cancel := context.WithTimeout(t.Context(), nvidiatest.HangLimit)
	defer cancel()
	if err := p.StopWorkers(short); !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "0000:02:00.0") {
		t.Errorf("a busy worker: %v", err)
	}
}
