package main

import (
	"os"
	"testing"

	"k8s.io/klog/v2"
)

func TestMain(m *testing.M) {
	m.Run()
	klog.Flush()
}

// The exit code must distinguish wrong usage from other failures, because the container runtime and
// the kubelet show the code to the user.
func TestExitCodes(t *testing.T) {
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	stdin := os.Stdin
	os.Stdin = null
	t.Cleanup(func() { os.Stdin = stdin })
	for name, c := range map[string]struct {
		args []string
		want int
	}{
		"no command":               {nil, exitUsage},
		"an unknown command":       {[]string{"serve"}, exitUsage},
		"an unknown flag":          {[]string{"supervise", "--nothing"}, exitUsage},
		"an argument too many":     {[]string{"supervise", "now"}, exitUsage},
		"a relative directory":     {[]string{"supervise", "--plugin-dir=plugin"}, exitFailed},
		"no supervisor":            {[]string{"status", "--plugin-dir=/nowhere"}, exitFailed},
		"a limit without a GPU":    {[]string{"memory-limit", "--minor=0", "--mebibytes=1024"}, exitUsage},
		"a limit without a minor":  {[]string{"memory-limit", "--gpu=GPU-0", "--mebibytes=1024"}, exitUsage},
		"a limit of nothing":       {[]string{"memory-limit", "--gpu=GPU-0", "--minor=0"}, exitUsage},
		"a limit without a state":  {[]string{"memory-limit", "--gpu=GPU-0", "--minor=0", "--mebibytes=1024"}, exitFailed},
		"a daemon without a view":  {[]string{"daemon"}, exitUsage},
		"a daemon with a bad view": {[]string{"daemon", "{}"}, exitUsage},
		"help":                     {[]string{"supervise", "--help"}, 0},
		"the version":              {[]string{"version"}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			if have := run(t.Context(), c.args); have != c.want {
				t.Errorf("exit code %d, not %d", have, c.want)
			}
		})
	}
}
