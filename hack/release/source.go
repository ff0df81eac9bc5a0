package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os/exec"
	"strconv"
	"strings"
	"time"
)

// source is the checkout that a release is made from.
type source struct {
	dir    string
	commit string
	time   time.Time
	// modified is true if files differ from the commit. Such a release cannot be pushed.
	modified bool
	// tagged is true if the tag of the version exists. Then it names the commit.
	tagged bool
}

// checkCommand fails where build would fail because of the version. It takes no time, so it comes
// before the programs are compiled.
func checkCommand(flags *flag.FlagSet) func(context.Context, []string) error {
	version := flags.String("version", "", "version of the release, like v0.1.0")
	return func(ctx context.Context, _ []string) error {
		_, err := readSource(ctx, *version)
		return err
	}
}

// readSource describes the checkout around the working folder, for a release of the version.
// Everything in a release has the time of the commit.
func readSource(ctx context.Context, version string) (source, error) {
	var s source
	if !versionForm.MatchString(version) {
		return s, fmt.Errorf("version %q: want the form v1.2.3 or v1.2.3-rc.1", version)
	}
	git := func(args ...string) (string, error) {
		cmd := exec.CommandContext(ctx, "git", args...)
		cmd.Dir = s.dir
		out, err := cmd.Output()
		if err != nil {
			return "", fmt.Errorf("read the source: git %s: %w", strings.Join(args, " "), err)
		}
		return strings.TrimSpace(string(out)), nil
	}
	var err error
	if s.dir, err = git("rev-parse", "--show-toplevel"); err != nil {
		return s, err
	}
	fields, err := git("log", "-1", "--format=%H %ct")
	if err != nil {
		return s, err
	}
	commit, seconds, _ := strings.Cut(fields, " ")
	at, err := strconv.ParseInt(seconds, 10, 64)
	if err != nil {
		return s, fmt.Errorf("read the time of commit %s: %w", commit, err)
	}
	tagged, err := git("rev-parse", "--verify", "--quiet", "refs/tags/"+version+"^{commit}")
	var exit *exec.ExitError
	switch {
	case errors.As(err, &exit) && exit.ExitCode() == 1: // there is no such tag
	case err != nil:
		return s, err
	case tagged != commit:
		return s, fmt.Errorf("tag %s is commit %s, but the source is commit %s: check out the tag, or choose another version",
			version, tagged, commit)
	default:
		s.tagged = true
	}
	status, err := git("status", "--porcelain")
	s.commit, s.time, s.modified = commit, time.Unix(at, 0).UTC(), status != ""
	return s, err
}

// dependency names the commit, and the version's tag if there is one.
func (s source) dependency(version string) dependency {
	d := dependency{URI: "git+" + repository, Digest: map[string]string{"gitCommit": s.commit}}
	if s.tagged {
		d.URI += "@refs/tags/" + version
	}
	return d
}
