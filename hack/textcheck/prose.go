package main

import (
	"go/scanner"
	"go/token"
	"path"
	"regexp"
	"strings"
)

// generated matches the line by which Go's tools recognise generated files, also with the comment
// sign # of other languages.
var generated = regexp.MustCompile(`(?m)^(//|#) Code generated .* DO NOT EDIT\.$`)

// directive matches a comment that a tool reads, which cannot be wrapped.
var directive = regexp.MustCompile(`^\s*(//(go:|nolint|export |line )|#!|# syntax=)`)

// proseLines returns the numbers of the lines that hold only a comment or prose. The first line has
// number 1.
func proseLines(file string, src []byte) map[int]bool {
	lines := strings.Split(string(src), "\n")
	prose := map[int]bool{}
	switch name := path.Base(file); path.Ext(name) {
	case ".go":
		goComments(src, lines, prose)
	case ".md":
		markdown(lines, prose)
	case ".c", ".h", ".mod":
		marked(lines, "//", prose)
	case ".yaml", ".yml", ".tpl", ".sh":
		marked(lines, "#", prose)
	default:
		if name == "Makefile" || name == "Dockerfile" || strings.HasPrefix(lines[0], "#!") {
			marked(lines, "#", prose)
		}
	}
	for i, line := range lines {
		if directive.MatchString(line) {
			delete(prose, i+1)
		}
	}
	return prose
}

func goComments(src []byte, lines []string, prose map[int]bool) {
	file := token.NewFileSet().AddFile("", -1, len(src))
	var s scanner.Scanner
	s.Init(file, src, nil, scanner.ScanComments)
	for {
		pos, tok, text := s.Scan()
		if tok == token.EOF {
			return
		}
		at := file.Position(pos)
		if tok != token.COMMENT || strings.TrimSpace(lines[at.Line-1][:at.Column-1]) != "" {
			continue
		}
		for i := range strings.Count(text, "\n") + 1 {
			prose[at.Line+i] = true
		}
	}
}

// marked adds the numbers of comment lines to the map prose: lines that begin with mark, and
// comments from /* to */, as in C and in Helm's templates.
func marked(lines []string, mark string, prose map[int]bool) {
	block := false
	for i, line := range lines {
		text := strings.TrimLeft(line, " \t{-")
		block = block || strings.HasPrefix(text, "/*")
		if block || strings.HasPrefix(text, mark) {
			prose[i+1] = true
		}
		block = block && !strings.Contains(line, "*/")
	}
}

var (
	fence     = regexp.MustCompile("^ *(```|~~~)")
	listItem  = regexp.MustCompile(`^ *([-*+]|\d+\.) `)
	table     = regexp.MustCompile(`^ *\|`)
	reference = regexp.MustCompile(`^\[[^\]]+\]: `)
)

// markdown adds to the map prose the numbers of all lines of a Markdown file except code, tables
// and the targets of links.
func markdown(lines []string, prose map[int]bool) {
	fenced, code, text := false, false, 0 // text is the column where the text of a list item begins
	for i, line := range lines {
		if fence.MatchString(line) {
			fenced = !fenced
			continue
		}
		blank := strings.TrimSpace(line) == ""
		indent := len(line) - len(strings.TrimLeft(line, " "))
		if !blank && indent == 0 {
			text = 0
		}
		// Code begins after a blank line, at least four columns to the right of the text around it.
		afterBlank := i > 0 && strings.TrimSpace(lines[i-1]) == ""
		code = code && blank || indent >= text+4 && (code || afterBlank)
		if item := listItem.FindString(line); item != "" && !code {
			text = len(item)
		}
		if !fenced && !code && !table.MatchString(line) && !reference.MatchString(line) {
			prose[i+1] = true
		}
	}
}
