package main

import (
	"cmp"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// little is a part of the processors' time. The report does not name programs that used less.
	little = 0.005
	// The report shows the slowest 1/slowest of the rounds separately. A round has eight calls, so
	// these rounds contain about the slowest hundredth of the calls.
	slowest = 20
)

// processors records which programs used the processors in each measured round.
type processors struct{ rounds []round }

type round struct {
	took time.Duration
	had  map[string]time.Duration // processor time by program; all kernel threads count as one
}

// while calls do as one round, and records the processor time that each program used in the
// meantime. Reading these times also takes processor time. So the shares of other programs are
// slightly too high, and the idle share is slightly too low or even below 0.
func (p *processors) while(do func() error) error {
	before, mine, begin := runTimes(), own(), time.Now()
	err := do()
	r := round{time.Since(begin), map[string]time.Duration{"this measurement": own() - mine}}
	for thread, now := range runTimes() {
		if !strings.HasPrefix(thread.path, myself) {
			r.had[thread.program] += now - before[thread]
		}
	}
	p.rounds = append(p.rounds, r)
	return err
}

func (p *processors) String() string {
	rounds := slices.SortedFunc(slices.Values(p.rounds), func(a, b round) int { return cmp.Compare(a.took, b.took) })
	slow := rounds[len(rounds)-max(len(rounds)/slowest, 1):]
	return fmt.Sprintf("all %d rounds: %s\n  the %d slowest: %s", len(rounds), mean(rounds), len(slow), mean(slow))
}

// mean describes the mean duration of the rounds, and how programs shared the processors in them.
func mean(rounds []round) string {
	var sum round
	sum.had = map[string]time.Duration{}
	for _, r := range rounds {
		sum.took += r.took
		for name, had := range r.had {
			sum.had[name] += had
		}
	}
	all := sum.took * time.Duration(runtime.NumCPU())
	rest, n := all, time.Duration(len(rounds))
	var parts []string
	part := func(name string, had time.Duration) {
		parts = append(parts, fmt.Sprintf("%s %.2f ms (%.0f %%)", name, 1e3*(had/n).Seconds(), 100*had.Seconds()/all.Seconds()))
	}
	for _, name := range slices.SortedFunc(maps.Keys(sum.had), func(a, b string) int { return cmp.Compare(sum.had[b], sum.had[a]) }) {
		rest -= sum.had[name]
		if float64(sum.had[name]) >= little*float64(all) {
			part(name, sum.had[name])
		}
	}
	part("idle and others", rest)
	return fmt.Sprintf("%.2f ms; of the processors' time %s", 1e3*(sum.took/n).Seconds(), strings.Join(parts, ", "))
}

// myself is the prefix of this process's paths in /proc. The method while skips these paths, and
// takes this process's time from function own.
var myself = fmt.Sprintf("/proc/%d/", os.Getpid())

func own() time.Duration {
	var used unix.Rusage
	_ = unix.Getrusage(unix.RUSAGE_SELF, &used)
	return time.Duration(used.Utime.Nano() + used.Stime.Nano())
}

type thread struct{ program, path string }

// runTimes returns the processor time so far of every thread of the machine.
func runTimes() map[thread]time.Duration {
	times := map[thread]time.Duration{}
	paths, _ := filepath.Glob("/proc/[0-9]*/task/[0-9]*/schedstat")
	names := map[string]string{}
	for _, path := range paths {
		raw, err := os.ReadFile(path)
		if err != nil {
			continue // the thread has ended
		}
		process := strings.Join(strings.SplitN(path, "/", 4)[:3], "/")
		if names[process] == "" {
			names[process] = programOf(process)
		}
		ran, _, _ := strings.Cut(string(raw), " ")
		if n, err := strconv.ParseInt(ran, 10, 64); err == nil {
			times[thread{names[process], path}] = time.Duration(n)
		}
	}
	return times
}

func programOf(process string) string {
	if line, err := os.ReadFile(process + "/cmdline"); err == nil && len(line) == 0 {
		return "the kernel"
	}
	name, _ := os.ReadFile(process + "/comm")
	return strings.TrimSpace(string(name))
}
