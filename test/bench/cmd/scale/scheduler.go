package main

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"k8s.io/client-go/rest"
)

// profileSeconds is the length of a CPU profile of the scheduler.
const profileSeconds = 10

// profile writes a CPU profile of the scheduler to a file, if the flag --profiles names a folder.
// The returned channel receives one value when the file is written: nil, or an error.
func (s *scale) profile(ctx context.Context, k key) <-chan error {
	done := make(chan error, 1)
	if s.profiles == "" {
		done <- nil
		return done
	}
	go func() {
		name := fmt.Sprintf("%s_%s_%s_%d.pprof", k.kubernetes, k.layout, k.claim, k.nodes)
		path := filepath.Join(s.profiles, strings.ReplaceAll(name, " ", "-"))
		done <- s.writeProfile(ctx, path)
	}()
	return done
}

func (s *scale) writeProfile(ctx context.Context, path string) error {
	content, err := s.askScheduler(ctx, fmt.Sprintf("/debug/pprof/profile?seconds=%d", profileSeconds))
	if err != nil {
		return err
	}
	if err := os.MkdirAll(s.profiles, 0o750); err != nil {
		return err
	}
	return os.WriteFile(path, content, 0o600)
}

// processorTime returns the scheduler's processor time since its start. Unlike elapsed time, it
// does not depend on the machine's other load.
func (s *scale) processorTime(ctx context.Context) (time.Duration, error) {
	const name = "process_cpu_seconds_total "
	content, err := s.askScheduler(ctx, "/metrics")
	if err != nil {
		return 0, err
	}
	for lines := bufio.NewScanner(bytes.NewReader(content)); lines.Scan(); {
		if value, found := strings.CutPrefix(lines.Text(), name); found {
			seconds, err := strconv.ParseFloat(value, 64)
			if err != nil {
				return 0, fmt.Errorf("the scheduler's %s: %w", name, err)
			}
			return time.Duration(seconds * float64(time.Second)), nil
		}
	}
	return 0, fmt.Errorf("the scheduler has no metric %s", name)
}

func (s *scale) askScheduler(ctx context.Context, path string) ([]byte, error) {
	client, err := rest.HTTPClientFor(s.schedulerConfig)
	if err != nil {
		return nil, err
	}
	url := "https://" + s.schedulerConfig.Host + path
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	response, err := client.Do(request)
	if err != nil {
		return nil, fmt.Errorf("ask the scheduler: %w", err)
	}
	defer func() { _ = response.Body.Close() }()
	content, err := io.ReadAll(response.Body)
	if err == nil && response.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", response.Status, content)
	}
	if err != nil {
		return nil, fmt.Errorf("ask the scheduler for %s: %w", path, err)
	}
	return content, nil
}

// settle waits until the scheduler has processed the objects that were created so far. Their cost
// must not count as that of claims.
func (s *scale) settle(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	const pause, busy = 250 * time.Millisecond, 25 * time.Millisecond
	before, err := s.processorTime(ctx)
	for err == nil {
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for the scheduler to have nothing to do: %w", ctx.Err())
		case <-time.After(pause):
		}
		var now time.Duration
		if now, err = s.processorTime(ctx); err == nil && now-before < busy {
			return nil
		}
		before = now
	}
	return err
}
