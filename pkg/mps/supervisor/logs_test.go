package supervisor

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// passed collects the lines that a follower forwarded.
type passed []string

func follow(t *testing.T) (f *follower, path string, got *passed) {
	t.Helper()
	dir := t.TempDir()
	got = &passed{}
	return newFollower(dir, func(_, line string) { *got = append(*got, line) }), filepath.Join(dir, outputFile), got
}

func add(t *testing.T, path, text string) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteString(text); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
}

func TestFollowerForwardsCompleteLinesOnce(t *testing.T) {
	f, path, got := follow(t)
	f.poll() // No log file exists yet.
	add(t, path, "one\n\ntwo\nthr")
	f.poll()
	add(t, path, "ee\n")
	f.poll()
	f.poll()
	if want := []string{"one", "two", "three"}; !slices.Equal(*got, want) {
		t.Error(*got)
	}
}

func TestFollowerStartsAtEndOfLog(t *testing.T) {
	f, path, got := follow(t)
	add(t, path, "earlier\n")
	f = newFollower(filepath.Dir(path), f.lines)
	add(t, path, "now\n")
	f.poll()
	if !slices.Equal(*got, []string{"now"}) {
		t.Error(*got)
	}
}

func TestFollowerTruncatesLargeLog(t *testing.T) {
	f, path, got := follow(t)
	add(t, path, strings.Repeat(strings.Repeat("x", 99)+"\n", maxLog/100+1))
	f.poll()
	f.poll()
	if info, err := os.Stat(path); err != nil || info.Size() != 0 {
		t.Error(info.Size(), err)
	}
	if n := len(*got); n > 2*(maxLines+1) {
		t.Errorf("%d lines were forwarded", n)
	}
	*got = nil
	add(t, path, "after\n")
	f.poll()
	if !slices.Equal(*got, []string{"after"}) {
		t.Error(*got)
	}
}

func TestFollowerSplitsEndlessLine(t *testing.T) {
	f, path, got := follow(t)
	add(t, path, strings.Repeat("x", 3*maxLine))
	f.poll()
	if len(*got) != 1 || len((*got)[0]) != maxLine {
		t.Error(len(*got))
	}
}

func TestRoutineLine(t *testing.T) {
	const stamp = "[2026-11-21 08:14:03.612 Control  6975] "
	for line, want := range map[string]bool{
		stamp + "Accepting connection...":                     true,
		stamp + "NEW UI":                                      true,
		stamp + "Cmd:get_default_device_pinned_mem_limit 0":   true,
		stamp + "1G":                                          true,
		stamp + "100.0":                                       true,
		stamp + "UI closed":                                   true,
		stamp + "Cmd:set_default_active_thread_percentage 30": false,
		stamp + "Cmd:quit -t 2":                               false,
		stamp + "NEW CLIENT 4267 from user 1000: Server is not ready":             false,
		stamp + "Starting new server 7905 for user 1000":                          false,
		stamp + "Server 7905 exited with status 1":                                false,
		"Cannot find MPS control daemon process":                                  false,
		stamp + "To connect CUDA applications to this daemon, set env CUDA_MPS_X": false,
	} {
		if have := routineLine.MatchString(line); have != want {
			t.Errorf("%q: %v", line, have)
		}
	}
}

func TestLastLines(t *testing.T) {
	dir := t.TempDir()
	f, err := openOutput(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	path := filepath.Join(dir, outputFile)
	add(t, path, "of the previous daemon\n")
	info, err := f.Stat()
	if err != nil {
		t.Fatal(err)
	}
	if words := lastLines(f, info.Size()); words != "" {
		t.Error(words)
	}
	for i := range 10 {
		add(t, path, fmt.Sprintf("reason %d\n[x Control 1] NEW UI\n", i))
	}
	if words := lastLines(f, info.Size()); words != ": reason 5; reason 6; reason 7; reason 8; reason 9" {
		t.Error(words)
	}
}
