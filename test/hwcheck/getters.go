package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/hwcheck/facts"
)

// execWithSysAdmin replaces this process with the conformance suite, which then has CAP_SYS_ADMIN
// and no other capability. It refuses every other program, and every argument but those with which
// the suite calls only its closed list of getters.
func execWithSysAdmin(argv []string) error {
	if len(argv) == 0 || filepath.Base(argv[0]) != conformance || !callsOnlyGetters(argv[1:]) {
		return fmt.Errorf("%s: not the getters of %s: %v", stageWithSysAdmin, conformance, argv)
	}
	return execWithoutCapabilities(argv, unix.CAP_SYS_ADMIN)
}

func callsOnlyGetters(args []string) bool {
	return len(args) == 4 && args[0] == "-lib" && args[1] != "" && args[2] == "-getters" && args[3] != ""
}

// checkGetters calls the getters without capabilities and, if this process may, with CAP_SYS_ADMIN.
// It adds the answers and their differences to the report.
func (s *visit) checkGetters(ctx context.Context) {
	const name = "NVML answers a privileged reader"
	found := &facts.Getters{}
	s.report.Getters = found
	var err error
	if found.Unprivileged, err = s.getters(ctx, stageWithoutCapabilities); err != nil {
		s.add(name, facts.Failed, "without capabilities: %v", err)
		return
	}
	if !hasSysAdmin() {
		s.add(name, facts.NotProven, "without capabilities NVML answers %d questions; run this check as root to ask with CAP_SYS_ADMIN too",
			len(found.Unprivileged))
		return
	}
	if found.Privileged, err = s.getters(ctx, stageWithSysAdmin); err != nil {
		s.add(name, facts.Failed, "with CAP_SYS_ADMIN: %v", err)
		return
	}
	var refused []string
	for _, question := range slices.Sorted(maps.Keys(found.Privileged)) {
		if answer := found.Privileged[question]; answer.Refused() {
			refused = append(refused, question+": "+answer.Error)
		}
	}
	differences := differentAnswers(found)
	detail := fmt.Sprintf("%d questions, %d answered differently without capabilities", len(found.Privileged), len(differences))
	if len(differences) > 0 {
		detail += " (" + strings.Join(differences[:min(3, len(differences))], "; ") + ")"
	}
	if len(refused) > 0 {
		s.add(name, facts.Differed, "%s; with CAP_SYS_ADMIN: %s", detail, strings.Join(refused, "; "))
		return
	}
	s.add(name, facts.Agreed, "%s", detail)
}

// getters runs the conformance suite's getters in one of the two stages and returns their answers.
func (s *visit) getters(ctx context.Context, stage string) (facts.Answers, error) {
	file := filepath.Join(s.work, stage+".json")
	argv := []string{s.programs.self, stage, s.programs.path(conformance), "-lib", s.report.Driver.Library, "-getters", file}
	result := start(ctx, command{argv: argv})
	if result.err != nil {
		return nil, errors.New(lastLines(result.summary(), 3))
	}
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	var answers facts.Answers
	if err := json.Unmarshal(data, &answers); err != nil {
		return nil, fmt.Errorf("read the answers: %w", err)
	}
	return answers, nil
}

// differentAnswers lists the questions that the two processes got different answers to.
func differentAnswers(found *facts.Getters) []string {
	if found.Privileged == nil {
		return nil
	}
	questions := maps.Clone(found.Privileged)
	maps.Copy(questions, found.Unprivileged)
	var differences []string
	for _, question := range slices.Sorted(maps.Keys(questions)) {
		with, without := found.Privileged[question], found.Unprivileged[question]
		if with != without {
			differences = append(differences, fmt.Sprintf("%s: %q with CAP_SYS_ADMIN, %q without", question, with, without))
		}
	}
	return differences
}
