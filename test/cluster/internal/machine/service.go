package machine

import (
	"context"
	"crypto/tls"
	"fmt"
	"log"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"
)

const (
	restartDelay  = 300 * time.Millisecond // between the end of a service and its next start
	readyPoll     = 50 * time.Millisecond
	readyDeadline = 5 * time.Minute  // generous: several builds may share the CPUs
	stopGrace     = 20 * time.Second // time between SIGTERM and SIGKILL
)

// supervised is one service of the machine. When its process ends, it is started again, unless stop
// was called.
type supervised struct {
	Service
	children *children
	env      []string

	mu      sync.Mutex
	wanted  bool
	current *process
	ended   chan struct{} // closed when the process that current names has been reaped
}

func (s *supervised) logFile() string { return serviceLog(s.Name) }

func serviceLog(name string) string { return filepath.Join("/var/log", name+".log") }

// start begins the service unless it is running.
func (s *supervised) start() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.wanted = true
	if s.current != nil {
		return nil
	}
	return s.launch()
}

// launch starts the service's process. The caller holds s.mu.
func (s *supervised) launch() error {
	process, err := s.children.start(s.Argv, s.env, s.logFile())
	if err != nil {
		return err
	}
	log.Printf("service %s started, process %d", s.Name, process.pid)
	s.current, s.ended = process, make(chan struct{})
	go s.watch(process, s.ended)
	return nil
}

// watch waits for the process to end, and restarts the service unless stop was called.
func (s *supervised) watch(process *process, ended chan struct{}) {
	description, _ := describeExit(<-process.exit)
	log.Printf("service %s ended: %s", s.Name, description)
	s.mu.Lock()
	s.current = nil
	close(ended)
	s.mu.Unlock()
	<-time.After(restartDelay) // a service that always fails must not use up the CPU
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.wanted || s.current != nil {
		return
	}
	if err := s.launch(); err != nil {
		log.Printf("service %s does not start again: %v", s.Name, err)
	}
}

// stop ends the service with the signal and waits. If the service does not end within stopGrace,
// stop sends SIGKILL.
func (s *supervised) stop(signal syscall.Signal) error {
	s.mu.Lock()
	s.wanted = false
	process, ended := s.current, s.ended
	s.mu.Unlock()
	if process == nil {
		return nil
	}
	for _, attempt := range []syscall.Signal{signal, syscall.SIGKILL} {
		if err := syscall.Kill(process.pid, attempt); err != nil && err != syscall.ESRCH {
			return fmt.Errorf("send %s to service %s: %w", attempt, s.Name, err)
		}
		select {
		case <-ended:
			return nil
		case <-time.After(stopGrace):
		}
	}
	return fmt.Errorf("service %s (process %d) does not end", s.Name, process.pid)
}

// awaitReady waits until the service answers at the address in Service.Ready. It returns an error
// if that takes longer than readyDeadline.
func (s *supervised) awaitReady(ctx context.Context) error {
	if s.Ready == "" {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, readyDeadline)
	defer cancel()
	for {
		err := probe(ctx, s.Ready)
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("service %s is not ready after %s: %w", s.Name, readyDeadline, err)
		case <-time.After(readyPoll):
		}
	}
}

// prober sends readiness requests to services of this machine. It does not verify their
// certificates.
var prober = &http.Client{
	Timeout:   2 * time.Second,
	Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, DisableKeepAlives: true},
}

func probe(ctx context.Context, target string) error {
	if path, ok := strings.CutPrefix(target, "unix://"); ok {
		connection, err := net.Dial("unix", path)
		if err != nil {
			return err
		}
		return connection.Close()
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, target, nil)
	if err != nil {
		return err
	}
	response, err := prober.Do(request)
	if err != nil {
		return err
	}
	defer func() { _ = response.Body.Close() }()
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("%s answers %s", target, response.Status)
	}
	return nil
}
