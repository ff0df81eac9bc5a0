// Textcheck checks the words and the width of every text in the repository: comments, Markdown,
// names, messages and file names. Its tables are in words.go.
//
//	textcheck [paths…]
//
// Without paths it checks every file that git does not ignore. It prints one finding a line and
// exits with 1 if there are any.
package main

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

// columns is the largest width of a line in comments and Markdown. A tab counts as one column.
const columns = 100

func main() {
	findings, err := run(os.Args[1:])
	for _, f := range findings {
		fmt.Println(f)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "textcheck:", err)
		os.Exit(2)
	}
	if len(findings) > 0 {
		fmt.Fprintf(os.Stderr, "textcheck: %d findings\n", len(findings))
		os.Exit(1)
	}
}

func run(paths []string) ([]string, error) {
	list := append([]string{"ls-files", "-z", "--cached", "--others", "--exclude-standard", "--"}, paths...)
	listed, err := exec.Command("git", list...).Output()
	if err != nil {
		return nil, fmt.Errorf("list files with git: %w", err)
	}
	files := strings.FieldsFunc(string(listed), func(r rune) bool { return r == 0 })
	slices.Sort(files)
	var findings []string
	for _, file := range slices.Compact(files) {
		src, err := os.ReadFile(file)
		if errors.Is(err, fs.ErrNotExist) {
			continue // The file is deleted, but still in the index.
		}
		if err != nil {
			return findings, err
		}
		findings = append(findings, check(file, src)...)
	}
	return findings, nil
}

// check returns the findings in a file as "file:line: what is wrong: what to write". Line 0 means
// the file's name.
func check(file string, src []byte) []string {
	var findings []string
	report := func(line int, found, write string) {
		findings = append(findings, fmt.Sprintf("%s:%d: %s: %s", file, line, found, write))
	}
	checkWords(file, file, func(found, write string) { report(0, found, write) })
	if exempt(file, src) {
		return findings
	}
	wrappable := proseLines(file, src)
	for i, line := range strings.Split(string(src), "\n") {
		checkWords(file, line, func(found, write string) { report(i+1, found, write) })
		if width := utf8.RuneCountInString(line); width > columns && wrappable[i+1] && breakable(line) {
			report(i+1, fmt.Sprintf("%d columns", width), fmt.Sprintf("wrap at %d", columns))
		}
	}
	return findings
}

// exempt reports whether textcheck checks only the file's name. That is so for files whose content
// others wrote, and for generated files.
func exempt(file string, src []byte) bool {
	name := path.Base(file)
	return name == "LICENSE" || name == "go.sum" || slices.Contains(strings.Split(file, "/"), "testdata") ||
		path.Dir(path.Dir(file)) == "test/hardware" || // a report of hwcheck
		bytes.IndexByte(src, 0) >= 0 || generated.Match(src)
}

func checkWords(file, line string, report func(found, write string)) {
	// Remove the escapes \n and \t first, or their letters would count as part of the next word.
	line = strings.NewReplacer(`\n`, "  ", `\t`, "  ").Replace(line)
	for _, word := range words(line) {
		if write, ok := gone[strings.ToLower(word)]; ok && !excepted(file, strings.ToLower(word)) {
			report(fmt.Sprintf("%q", word), "write "+write)
		}
	}
	for _, r := range riddles {
		if found := r.pattern.FindString(line); found != "" && !excepted(file, strings.ToLower(found)) {
			report(fmt.Sprintf("%q", found), r.write)
		}
	}
}

// words returns the words in text. It splits at every character that is not a letter, and within
// camelCase.
func words(text string) []string {
	var found []string
	for _, run := range strings.FieldsFunc(text, func(r rune) bool { return !unicode.IsLetter(r) }) {
		letters, start := []rune(run), 0
		for i := 1; i < len(letters); i++ {
			hump := unicode.IsUpper(letters[i]) && (unicode.IsLower(letters[i-1]) ||
				i+1 < len(letters) && unicode.IsLower(letters[i+1]))
			if hump {
				found = append(found, string(letters[start:i]))
				start = i
			}
		}
		found = append(found, string(letters[start:]))
	}
	return found
}

// breakable reports whether a line can be wrapped so that each word fits into a line.
func breakable(line string) bool {
	text := strings.TrimLeftFunc(line, func(r rune) bool { return !unicode.IsLetter(r) && r != '[' })
	mark := utf8.RuneCountInString(line) - utf8.RuneCountInString(text)
	fields := strings.Fields(text)
	for _, field := range fields {
		if mark+utf8.RuneCountInString(field) > columns {
			return false
		}
	}
	return len(fields) > 1
}

// excepted reports whether the table exceptions lets this file use the word.
func excepted(file, word string) bool {
	return slices.ContainsFunc(exceptions, func(e exception) bool {
		return strings.HasPrefix(file, e.path) && (e.word == "" || e.word == word)
	})
}
