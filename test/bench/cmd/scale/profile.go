package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"

	"k8s.io/client-go/rest"
)

// profileSeconds is how long the scheduler is looked at: the rates are of claims that take longer together, or are too few to say much.
const profileSeconds = 10

// profile writes where the scheduler spends its time while claims are allocated, if that is wanted. The answer comes when it is written.
func (s *scale) profile(ctx context.Context, k key) <-chan error {
	done := make(chan error, 1)
	if s.profiles == "" {
		done <- nil
		return done
	}
	go func() {
		path := filepath.Join(s.profiles, strings.ReplaceAll(fmt.Sprintf("%s_%s_%s_%d.pprof", k.scheduler, k.layout, k.class, k.nodes), " ", "-"))
		if err := s.fetchProfile(ctx, path); err != nil {
			done <- fmt.Errorf("profile the scheduler: %w", err)
			return
		}
		done <- nil
	}()
	return done
}

func (s *scale) fetchProfile(ctx context.Context, path string) error {
	client, err := rest.HTTPClientFor(s.profiled)
	if err != nil {
		return err
	}
	url := fmt.Sprintf("https://%s/debug/pprof/profile?seconds=%d", s.profiled.Host, profileSeconds)
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	response, err := client.Do(request)
	if err != nil {
		return err
	}
	defer func() { _ = response.Body.Close() }()
	content, err := io.ReadAll(response.Body)
	if err != nil {
		return err
	}
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s: %s", url, response.Status, content)
	}
	if err := os.MkdirAll(s.profiles, 0o750); err != nil {
		return err
	}
	return os.WriteFile(path, content, 0o600)
}
