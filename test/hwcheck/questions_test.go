package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/hwcheck/facts"
)

// A question without an answer ends by itself, and the next one is asked. What a program printed
// until then is in the report.
func TestQuestionWithoutAnswerEndsByItself(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, hang := &visit{progress: io.Discard}, make(chan struct{})
		begun := time.Now()
		s.last = begun
		s.ask(t.Context(), []question{
			{name: "a file that hangs", ask: func(context.Context) (string, error) { <-hang; return "", nil }},
			{name: "a program that is ended", ask: func(ctx context.Context) (string, error) { <-ctx.Done(); return "half", ctx.Err() }},
			{name: "the next", ask: func(context.Context) (string, error) { return "1\n2", nil }},
		})
		close(hang)
		if took := time.Since(begun); took != 2*questionLimit+questionEnd {
			t.Errorf("it took %s", took)
		}
		got := s.report.Checks
		if len(got) != 3 || got[0].Verdict != facts.Failed || got[1].Verdict != facts.Failed || got[1].Answer != "half" ||
			!strings.HasPrefix(got[0].Detail, "no answer within 1m15s") || got[0].Millis != (questionLimit+questionEnd).Milliseconds() ||
			got[2].Verdict != facts.Recorded || got[2].Answer != "1\n2" || got[2].Detail != "2" {
			t.Errorf("%+v", got)
		}
	})
}

func TestVerdictOfAnswers(t *testing.T) {
	simulated := &visit{report: facts.Report{Driver: &facts.Driver{Simulated: true}}}
	hardware := &visit{report: facts.Report{Driver: &facts.Driver{}}}
	const client = `mps-client: {"step":"done","error":0}`
	answer := func(text string, err error, judge func(string) (facts.Verdict, string)) question {
		return question{name: "q", judge: judge, ask: func(context.Context) (string, error) { return text, err }}
	}
	for name, x := range map[string]struct {
		question question
		want     facts.Verdict
	}{
		"nothing to compare with":  {answer("anything", nil, nil), facts.Recorded},
		"an error":                 {answer("some", errors.New("no"), judgeParameters), facts.Failed},
		"runc is refused":          {answer("", fmt.Errorf("%w (no cgroup)", errNotByRunc), nil), facts.NotProven},
		"parameters are writable":  {answer("params: mode 0644, can be written", nil, judgeParameters), facts.Differed},
		"parameters are read-only": {answer("params: mode 0644, for writing: x, "+readOnly, nil, judgeParameters), facts.Agreed},
		"other users may write":    {answer("params: mode 0444, for writing: permission denied", nil, judgeParameters), facts.Differed},
		"there are no parameters":  {answer("params: no such file or directory", nil, judgeParameters), facts.NotProven},
		"two clients":              {answer(`mps-daemon: {"clients":2}`+"\n"+client+"\n"+client, nil, hardware.judgeClients), facts.Agreed},
		"one client":               {answer(`mps-daemon: {"clients":1}`+"\n"+client+"\n"+client, nil, hardware.judgeClients), facts.Differed},
		"a client that failed":     {answer(`mps-daemon: {"clients":2}`+"\n"+client, nil, hardware.judgeClients), facts.Differed},
		"a simulated client":       {answer(client, nil, simulated.judgeClients), facts.NotProven},
	} {
		s := &visit{progress: io.Discard}
		s.ask(t.Context(), []question{x.question})
		if got := s.report.Checks[0]; got.Verdict != x.want || got.Answer == "" && x.want != facts.NotProven {
			t.Errorf("%s: %+v, want %s", name, got, x.want)
		}
	}
}

func TestFilesAreDescribed(t *testing.T) {
	folder := t.TempDir()
	if err := errors.Join(os.WriteFile(filepath.Join(folder, "icd.json"), []byte("{}"), 0o600),
		os.Symlink("icd.json", filepath.Join(folder, "link")), os.Chmod(folder, 0o750)); err != nil { //nolint:gosec // a test's folder
		t.Fatal(err)
	}
	got := describe(folder) + describe("/dev/null") + describe(filepath.Join(folder, "none"))
	for _, want := range []string{
		folder + ": mode 0750,", "icd.json: mode 0600, owner ", ", " + writable + "\n", "a link to icd.json\n", "/dev/null: mode 0666, owner ",
		", device 1:3\n", "none: lstat " + filepath.Join(folder, "none") + ": no such file",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("%q is missing:\n%s", want, got)
		}
	}
	if data, err := os.ReadFile(filepath.Join(folder, "icd.json")); err != nil || string(data) != "{}" {
		t.Errorf("the file was changed: %q (%v)", data, err)
	}
}

// The answer has what only one of the two specifications has.
func TestToolkitSpecificationIsCompared(t *testing.T) {
	mount := func(path string) *specs.Mount { return &specs.Mount{HostPath: path, ContainerPath: path} }
	ours := &specSet{}
	ours.base.ContainerEdits.Mounts = []*specs.Mount{mount("/both"), mount("/ours")}
	ctk := writeScript(t, nvidiaCTK, `[ "$1 $2" = "cdi generate" ] || exit 1
echo '{"containerEdits":{"mounts":[{"hostPath":"/both","containerPath":"/both"}]},"devices":[{"containerEdits":{"additionalGids":[44]}}]}'`)
	self := writeScript(t, "hwcheck", `[ "$1" = without-capabilities ] && shift && exec "$@"`)
	s := &visit{progress: io.Discard, options: options{ctk: ctk}, programs: programs{self: self}}
	s.report.Driver = &facts.Driver{Root: "/"}
	s.ask(t.Context(), []question{s.toolkitQuestion(ours)})
	got := s.report.Checks[0]
	if got.Verdict != facts.Recorded || got.Detail != "1 lines are in both, 1 only in the plugin's, 1 only in nvidia-ctk's" ||
		!strings.Contains(got.Answer, "only the plugin's:\nmount /ours from /ours ()\nonly nvidia-ctk's:\ngroup 44\n") {
		t.Errorf("%+v", got)
	}
}
