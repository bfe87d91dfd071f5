;; Drive the language server from Emacs in batch mode, and print what it found as one line of JSON.

(require 'eglot)
(require 'json)

(defun wait-for (what check)
  (let ((end (+ (float-time) 20)))
    (while (not (funcall check))
      (when (> (float-time) end) (error "nothing came of %s" what))
      (accept-process-output nil 0.05))))

(setq eglot-sync-connect 20 eglot-confirm-server-initiated-edits nil create-lockfiles nil make-backup-files nil)

(defun main (file)
  (find-file file)
  (call-interactively #'eglot)
  (flymake-mode 1)
  (flymake-start)
  (wait-for "the faults" #'flymake-diagnostics)
  (let* ((fault (car (flymake-diagnostics)))
         (word (buffer-substring-no-properties (flymake-diagnostic-beg fault) (flymake-diagnostic-end fault)))
         (line (line-number-at-pos (flymake-diagnostic-beg fault)))
         (text (car (split-string (flymake-diagnostic-text fault) "\n"))))
    (goto-char (point-min))
    (search-forward "as: x")
    (backward-char 1)
    (eglot-rename "wide")
    (princ (json-encode (list :word word :line line :text text
                              :done (split-string (buffer-substring-no-properties (point-min) (point-max)) "\n" t))))
    (terpri)))
