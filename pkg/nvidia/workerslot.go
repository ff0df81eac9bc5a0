package nvidia

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"time"
)

// workerSlot holds the worker process of one card. The channel busy is its lock: a goroutine may
// use the other fields between its send to busy and its receive from it.
type workerSlot struct {
	idle  time.Duration
	start func() (*worker, error)
	busy  chan struct{}
	// worker is the worker that was started last. It may have ended.
	worker *worker
	timer  *time.Timer
}

// call sends r to the card's worker after all earlier requests and returns the answer. After an
// error that a new process may cure, it kills the worker.
func (s *workerSlot) call(ctx context.Context, r request) (answer, *PartitionError) {
	select {
	case s.busy <- struct{}{}:
	case <-ctx.Done():
		return answer{}, timeoutError(r, context.Cause(ctx), "an earlier call on this GPU is still running; nothing was done")
	}
	defer func() { <-s.busy }()
	if s.timer != nil {
		s.timer.Stop()
	}
	w, failure := s.readyWorker(ctx, r)
	if failure != nil {
		return answer{}, failure
	}
	a, failure := w.call(ctx, r)
	if failure == nil {
		failure = a.Error
	}
	if failure != nil && !failure.keepsWorker() {
		w.kill()
		return answer{}, failure
	}
	s.timer = time.AfterFunc(s.idle, func() { s.stopIdle(w) })
	if failure != nil {
		return answer{}, failure
	}
	return a, nil
}

// keepsWorker reports whether the worker can be used again after this error. After any other error,
// a new worker process is more likely to succeed.
func (e *PartitionError) keepsWorker() bool {
	switch e.Code {
	case CodeInUse, CodeInsufficient, CodeNotFound, CodeNotSupported, CodeChanged:
		return true
	}
	return false
}

// readyWorker returns a worker that can take a request, and starts one if there is none. If the
// last worker was killed but hangs, it waits until that process is gone, and returns an error if
// ctx ends first.
func (s *workerSlot) readyWorker(ctx context.Context, r request) (*worker, *PartitionError) {
	if w := s.worker; w != nil {
		if w.usable() {
			return w, nil
		}
		select {
		case <-w.gone:
		case <-ctx.Done():
			what := fmt.Sprintf("an earlier call still hangs in the NVIDIA driver (process %d): check dmesg, and reset the GPU or reboot the node",
				w.process.Pid)
			return nil, timeoutError(r, context.Cause(ctx), what)
		}
		s.worker = nil
	}
	w, err := s.start()
	if err != nil {
		return nil, r.fail(CodeOther, "start the worker: %v; nothing was done", err)
	}
	s.worker = w
	return w, nil
}

// stopIdle ends the worker w if it has been idle for s.idle.
func (s *workerSlot) stopIdle(w *worker) {
	select {
	case s.busy <- struct{}{}:
	default:
		return // a call uses the worker
	}
	defer func() { <-s.busy }()
	if s.worker == w && time.Since(w.lastUse) >= s.idle {
		w.kill()
	}
}

// stop ends the worker of the card after its current call, and waits until the process is gone. If
// ctx ends first, it returns an error.
func (s *workerSlot) stop(ctx context.Context) error {
	select {
	case s.busy <- struct{}{}:
	case <-ctx.Done():
		return fmt.Errorf("it is still running a call: %w", context.Cause(ctx))
	}
	defer func() { <-s.busy }()
	if s.timer != nil {
		s.timer.Stop()
	}
	if s.worker == nil {
		return nil
	}
	s.worker.kill()
	select {
	case <-s.worker.gone:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("process %d hangs in the NVIDIA driver: check dmesg, and reset the GPU or reboot the node: %w",
			s.worker.process.Pid, context.Cause(ctx))
	}
}

// worker is a child process with NVML open.
type worker struct {
	process *os.Process
	stdin   io.WriteCloser
	answers chan answer
	gone    chan struct{} // closed when the process has ended
	failure error         // why the process ended, to be read after gone is closed
	stderr  *tail
	ended   bool
	lastUse time.Time
}

func startWorker(p Paths, command []string) (*worker, error) {
	child := exec.Command(command[0], command[1:]...)
	stdin, err := child.StdinPipe() // the end of this pipe tells the child that the parent is gone
	if err != nil {
		return nil, err
	}
	stdout, err := child.StdoutPipe()
	if err != nil {
		return nil, err
	}
	w := &worker{stdin: stdin, answers: make(chan answer, 1), gone: make(chan struct{}), stderr: &tail{limit: 2048}}
	child.Stderr = w.stderr
	child.WaitDelay = time.Second
	if err := child.Start(); err != nil {
		return nil, err
	}
	w.process = child.Process
	go func() {
		defer close(w.gone)
		err := w.readAnswers(stdout)
		_ = child.Process.Kill() // the worker is useless after its output has ended or was invalid
		w.failure = errors.Join(err, child.Wait())
	}()
	// If the send fails, the worker is dead, and the first request reports that.
	_ = w.send(p)
	return w, nil
}

// readAnswers reads the worker's answers until its output ends.
func (w *worker) readAnswers(stdout io.Reader) error {
	decoder := json.NewDecoder(stdout)
	for {
		var a answer
		if err := decoder.Decode(&a); err != nil {
			if errors.Is(err, io.EOF) {
				return nil
			}
			return fmt.Errorf("read its answer: %w", err)
		}
		select {
		case w.answers <- a:
		default:
			return errors.New("unexpected answer without a request")
		}
	}
}

func (w *worker) send(v any) error {
	line, err := json.Marshal(v)
	if err != nil {
		return err
	}
	_, err = w.stdin.Write(append(line, '\n'))
	return err
}

// usable reports whether the worker can take another request, because it was not killed and its
// process still runs.
func (w *worker) usable() bool {
	select {
	case <-w.gone:
		return false
	default:
		return !w.ended
	}
}

func (w *worker) call(ctx context.Context, r request) (answer, *PartitionError) {
	defer func() { w.lastUse = time.Now() }()
	r.Patience = retryFor(ctx)
	_ = w.send(r) // if it fails, the worker is gone
	select {
	case a := <-w.answers:
		return a, nil
	case <-ctx.Done():
		w.kill()
		return answer{}, timeoutError(r, context.Cause(ctx), "the driver has not answered in time; the result is unknown")
	case <-w.gone:
	}
	select {
	case a := <-w.answers: // its last answer
		return a, nil
	default:
		return answer{}, r.fail(CodeDied, "the process that talks to the driver died (%v)%s", w.failure, w.stderr)
	}
}

// kill kills the worker. A worker that hangs in the driver ends only when the driver returns.
func (w *worker) kill() {
	w.ended = true
	_ = w.stdin.Close()
	_ = w.process.Kill()
}
